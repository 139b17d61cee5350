"""The model and its reference: found once, loaded when a suite needs them, and never more than that."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.backend.kv_format import KVCacheDtype
from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.lab.evaluate.answers import Answerer, LocalAnswerer
from headrace.lab.evaluate.choices import ContinuationScorer
from headrace.lab.evaluate.endpoint import EndpointAnswerer
from headrace.lab.evaluate.endpoint_scoring import EndpointScorer
from headrace.lab.evaluate.results import ModelContext
from headrace.lab.evaluate.scoring import Scorer, open_scorer
from headrace.model import store
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights import open_checkpoint

FLOAT32 = "float32"


@dataclass(slots=True, eq=False)
class Candidate:
    """One of the two. ``path`` is None behind an endpoint; its tokenizer may be at hand all the same."""

    reference: str
    path: Path | None
    tokenizer_path: Path | None
    quantization: Literal["int8", "int4"] | None
    kv_cache_dtype: KVCacheDtype
    backend: Literal["cpu", "torch"]
    device: str
    _tokenizer: Tokenizer | None = field(default=None, init=False)

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises ConfigError if it is behind an endpoint and its tokenizer is not at hand."""
        if self.tokenizer_path is None:
            raise ConfigError(
                f"To score given text the tokenizer of {self.reference} is needed: name a model or a folder "
                "that has it with --tokenizer."
            )
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_path)
        return self._tokenizer

    def vocab_size(self) -> int:
        """Width of its logits."""
        return self._checkpoint().architecture.vocab_size

    def max_positions(self) -> int | None:
        """The longest context it was made for, in tokens; not known of an endpoint's."""
        return None if self.path is None else self._checkpoint().architecture.max_positions

    def identity(self) -> str:
        """How it was named and run, and its files' fingerprint."""
        return f"{self.reference} {self.backend} {self._checkpoint().fingerprint()}"

    def context(self) -> ModelContext:
        """What a report says about it."""
        return ModelContext(
            reference=self.reference,
            fingerprint=None if self.path is None else self._checkpoint().fingerprint(),
            tokenizer=None if self.tokenizer_path is None else self.tokenizer().fingerprint,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            backend="endpoint" if self.path is None else self.backend,
            device=self.device,
        )

    def _checkpoint(self) -> Checkpoint:
        assert self.path is not None
        return open_checkpoint(self.path, quantization=self.quantization)


class Models:
    """Opens scorers and answerers, and keeps one kind of them open at a time.

    ``against``: another reference (loaded as its files are), ``float32``, or None. ``tokenizer`` is that of
    the models behind ``endpoint``; without one it is that of ``model``, if a model of that name is on this
    machine. Raises what resolving references and opening their files raises.
    """

    def __init__(
        self,
        model: str,
        against: str | None,
        *,
        quantization: Literal["int8", "int4"] | None,
        kv_cache_dtype: KVCacheDtype = "auto",
        backend: Literal["cpu", "torch"],
        device: str,
        threads: int,
        endpoint: str | None,
        tokenizer: str | None,
        downloads: store.Progress | None,
    ) -> None:
        self._threads = threads
        self._endpoint = endpoint
        self._scorers: dict[Candidate, Scorer | EndpointScorer] = {}
        self._answerers: dict[Candidate, Answerer] = {}

        def found(reference: str) -> Path | None:
            return None if endpoint is not None else store.resolve(reference, progress=downloads)

        def candidate(
            reference: str, quantization: Literal["int8", "int4"] | None, kv_cache_dtype: KVCacheDtype
        ) -> Candidate:
            path = found(reference)
            return Candidate(reference, path, path or remote, quantization, kv_cache_dtype, backend, device)

        remote = None if endpoint is None else _tokenizer_path(model, tokenizer, downloads)
        self.model = candidate(model, quantization, kv_cache_dtype)
        self.reference: Candidate | None = None
        if against == FLOAT32:
            path = self.model.path
            self.reference = Candidate(FLOAT32, path, path, None, "auto", "torch", "cpu")
        elif against is not None:
            self.reference = candidate(against, None, "auto")

    def scorer(self, candidate: Candidate, max_tokens: int) -> Scorer:
        """For sequences of ``max_tokens``, or as many as the model takes."""
        assert candidate.path is not None
        positions = candidate.max_positions()
        max_tokens = max_tokens if positions is None else min(max_tokens, positions)
        scorer = self._open(candidate, max_tokens)
        if scorer is None:
            scorer = self._scorers[candidate] = open_scorer(
                candidate.path,
                max_tokens=max_tokens,
                quantization=candidate.quantization,
                kv_cache_dtype=candidate.kv_cache_dtype,
                backend=candidate.backend,
                device=candidate.device,
                threads=self._threads,
            )
        assert isinstance(scorer, Scorer)
        return scorer

    def remote_scorer(self, candidate: Candidate, max_tokens: int) -> EndpointScorer:
        """For sequences of up to ``max_tokens``. Raises what asking the endpoint raises."""
        assert self._endpoint is not None
        scorer = self._open(candidate, max_tokens)
        if scorer is None:
            scorer = self._scorers[candidate] = EndpointScorer(
                self._endpoint, candidate.reference, candidate.tokenizer(), max_tokens
            )
        assert isinstance(scorer, EndpointScorer)
        return scorer

    def continuations(self, candidate: Candidate, max_tokens: int) -> ContinuationScorer:
        """Who scores the candidate's continuations, wherever it is."""
        if candidate.path is None:
            return self.remote_scorer(candidate, max_tokens)
        return self.scorer(candidate, max_tokens)

    def _open(self, candidate: Candidate, max_tokens: int) -> Scorer | EndpointScorer | None:
        """The scorer that is there, if sequences of that length fit it."""
        self._close(self._answerers)
        scorer = self._scorers.get(candidate)
        if scorer is not None and scorer.max_tokens < max_tokens:
            self._scorers.pop(candidate).close()
            return None
        return scorer

    def answerer(self, candidate: Candidate) -> Answerer:
        """Who generates the candidate's answers."""
        self._close(self._scorers)
        if candidate not in self._answerers:
            if self._endpoint is not None:
                self._answerers[candidate] = EndpointAnswerer(self._endpoint, candidate.reference)
            else:
                self._answerers[candidate] = LocalAnswerer(
                    str(candidate.path),
                    quantization=candidate.quantization,
                    kv_cache_dtype=candidate.kv_cache_dtype,
                    backend=candidate.backend,
                    device=candidate.device,
                    threads=self._threads,
                )
        return self._answerers[candidate]

    def require_same_tokenizer(self) -> None:
        """Raise ConfigError if the two do not cut text into the same tokens, out of the same vocabulary."""
        assert self.reference is not None
        same = self.model.tokenizer().fingerprint == self.reference.tokenizer().fingerprint
        if self.model.path is not None and self.model.vocab_size() != self.reference.vocab_size():
            same = False
        if not same:
            raise ConfigError(
                f"{self.model.reference} and {self.reference.reference} have different tokenizers: KL and "
                "the ratio of perplexities compare tokens, and need the same. Leave out --against, or the "
                "suite perplexity."
            )

    def close(self) -> None:
        """Release everything."""
        self._close(self._scorers)
        self._close(self._answerers)

    def _close(self, opened: dict[Candidate, Any]) -> None:
        while opened:
            opened.popitem()[1].close()


def _tokenizer_path(model: str, tokenizer: str | None, downloads: store.Progress | None) -> Path | None:
    """Where the tokenizer of an endpoint's model is: as told, or with a model of that name, if it is here."""
    if tokenizer is not None:
        folder = Path(tokenizer)
        return folder if folder.is_dir() else store.resolve(tokenizer, progress=downloads)
    here = {name: one.path for one in store.list_models() for name in (one.reference, one.alias) if name}
    return here.get(model) or (Path(model) if Path(model).exists() else None)
