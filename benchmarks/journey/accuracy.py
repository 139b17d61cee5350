"""How far a step's answers are from the float32 computation of the baseline's weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.journey import chat
from benchmarks.journey.steps import Server
from headrace.backend.batch import Float32
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.evaluate import reference_file
from headrace.lab.evaluate.divergence import LogProbs, Window, measure
from headrace.lab.evaluate.scoring import log_softmax, open_scorer


class Accuracy(msgspec.Struct):
    """Of the float32 computation to a step, per token of chat text: KL in nats, and the share of tokens for
    which both find the same token likeliest; each with its standard error."""

    kl: float
    kl_error: float
    same_top1: float
    same_top1_error: float


class Judge:
    """Measures each distinct model setting once, on ``tokens`` tokens of the journey's own kind of text.

    ``scratch``: a file for the reference's distributions, two bytes a token and word of the vocabulary.
    """

    def __init__(self, float_model: Path, tokens: int, seed: int, scratch: Path) -> None:
        self._model = float_model
        ids = load_tokenizer(float_model).encode(chat.text(seed))[:tokens]
        self._window = Window(ids, 1)
        self._scratch = scratch
        self._found: dict[object, Accuracy] = {}

    def baseline(self, dtype: str) -> Accuracy:
        """Of the transformers server: what its own rounding costs."""
        return self._judged("transformers", lambda: _Transformers(self._model, dtype))

    def of(self, server: Server) -> Accuracy | None:
        """Of a step's server; None if the scorer cannot be set as the server is."""
        known = inspect.signature(open_scorer).parameters
        settings: dict[str, Any] = {}
        for option, value in server.numbers[1]:
            name = option.removeprefix("--").replace("-", "_")
            if name not in known:
                return None
            settings[name] = value
        longest = len(self._window.token_ids)
        return self._judged(server.numbers, lambda: open_scorer(server.model, max_tokens=longest, **settings))

    def _judged(self, key: object, opened: Any) -> Accuracy:
        if key not in self._found:
            reference = self._reference()
            model = opened()
            try:
                _, divergence = measure([self._window], model, reference)
            finally:
                model.close()
            assert divergence is not None
            kl, same = divergence.kl, divergence.same_top1
            self._found[key] = Accuracy(kl.value, kl.se or 0.0, same.value, same.se or 0.0)
        return self._found[key]

    def _reference(self) -> LogProbs:
        if not self._scratch.exists():
            with open_scorer(self._model, max_tokens=len(self._window.token_ids), backend="torch") as scorer:
                described = reference_file.about(
                    [self._window], tokenizer="", vocab_size=scorer.vocab_size, reference="float32"
                )
                for _ in reference_file.write(self._scratch, described, [self._window], scorer):
                    pass
        return reference_file.ReferenceFile(self._scratch)


class _Transformers:
    """The baseline's own distributions."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import transformers

        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._network = network.eval()

    def log_probs(self, token_ids: Sequence[int], first: int = 1) -> Iterator[Float32]:
        """Rows ``[rows, vocab]``, as :class:`LogProbs` wants them."""
        import torch

        with torch.inference_mode():
            logits = self._network(torch.tensor([list(token_ids)])).logits[0, first - 1 : -1]
        yield log_softmax(logits.float().numpy())

    def close(self) -> None:
        """Release the model."""
        del self._network
