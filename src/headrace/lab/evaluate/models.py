"""The model and its reference: found once, loaded when a suite needs them, and never more than that."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.lab.evaluate.answers import Answerer, LocalAnswerer
from headrace.lab.evaluate.endpoint import EndpointAnswerer
from headrace.lab.evaluate.results import ModelContext
from headrace.lab.evaluate.scoring import Scorer, open_scorer
from headrace.model import store
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights import open_checkpoint

FLOAT32 = "float32"


@dataclass(slots=True, eq=False)
class Candidate:
    """One of the two. ``path`` is None behind an endpoint."""

    reference: str
    path: Path | None
    quantization: Literal["int8", "int4"] | None
    backend: Literal["cpu", "torch"]
    device: str
    _tokenizer: Tokenizer | None = field(default=None, init=False)

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        assert self.path is not None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.path)
        return self._tokenizer

    def vocab_size(self) -> int:
        """Width of its logits."""
        return self._checkpoint().architecture.vocab_size

    def max_positions(self) -> int:
        """The longest context it was made for, in tokens."""
        return self._checkpoint().architecture.max_positions

    def identity(self) -> str:
        """How it was named and run, and its files' fingerprint."""
        return f"{self.reference} {self.backend} {self._checkpoint().fingerprint()}"

    def context(self) -> ModelContext:
        """What a report says about it."""
        return ModelContext(
            reference=self.reference,
            fingerprint=None if self.path is None else self._checkpoint().fingerprint(),
            tokenizer=None if self.path is None else self.tokenizer().fingerprint,
            quantization=self.quantization,
            backend="endpoint" if self.path is None else self.backend,
            device=self.device,
        )

    def _checkpoint(self) -> Checkpoint:
        assert self.path is not None
        return open_checkpoint(self.path, quantization=self.quantization)


class Models:
    """Opens scorers and answerers, and keeps one kind of them open at a time.

    ``against``: another reference (loaded as its files are), ``float32``, or None. Raises what resolving
    references and opening their files raises.
    """

    def __init__(
        self,
        model: str,
        against: str | None,
        *,
        quantization: Literal["int8", "int4"] | None,
        backend: Literal["cpu", "torch"],
        device: str,
        threads: int,
        endpoint: str | None,
        downloads: store.Progress | None,
    ) -> None:
        self._threads = threads
        self._endpoint = endpoint
        self._scorers: dict[Candidate, Scorer] = {}
        self._answerers: dict[Candidate, Answerer] = {}

        def found(reference: str) -> Path | None:
            return None if endpoint is not None else store.resolve(reference, progress=downloads)

        path = found(model)
        self.model = Candidate(model, path, quantization, backend, device)
        self.reference: Candidate | None = None
        if against == FLOAT32:
            self.reference = Candidate(FLOAT32, path, None, "torch", "cpu")
        elif against is not None:
            self.reference = Candidate(against, found(against), None, backend, device)

    def scorer(self, candidate: Candidate, max_tokens: int) -> Scorer:
        """For sequences of ``max_tokens``, or as many as the model takes."""
        self._close(self._answerers)
        assert candidate.path is not None
        max_tokens = min(max_tokens, candidate.max_positions())
        scorer = self._scorers.get(candidate)
        if scorer is None or scorer.max_tokens < max_tokens:
            if scorer is not None:
                scorer.close()
            scorer = self._scorers[candidate] = open_scorer(
                candidate.path,
                max_tokens=max_tokens,
                quantization=candidate.quantization,
                backend=candidate.backend,
                device=candidate.device,
                threads=self._threads,
            )
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
                    backend=candidate.backend,
                    device=candidate.device,
                    threads=self._threads,
                )
        return self._answerers[candidate]

    def require_same_tokenizer(self) -> None:
        """Raise ConfigError if the two do not cut text into the same tokens, out of the same vocabulary."""
        assert self.reference is not None
        same = self.model.tokenizer().fingerprint == self.reference.tokenizer().fingerprint
        if not same or self.model.vocab_size() != self.reference.vocab_size():
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
