"""Perplexity of a text, and the divergence of two models on it, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from headrace.backend.batch import Float32
from headrace.errors import InvalidRequestError
from headrace.lab.evaluate.statistics import Estimate, mean, perplexity

Convention = Literal["windows", "llama.cpp"]
_STRETCHES = 256
DEFAULT_CONTEXT: dict[Convention, int] = {"windows": 1024, "llama.cpp": 512}


class LogProbs(Protocol):
    """Who gives log-softmax rows: a Scorer, or a file of a reference's."""

    def log_probs(self, token_ids: Sequence[int], first: int = 1) -> Iterator[Float32]:
        """Rows ``[rows, vocab]`` of the tokens at positions ``first …``, in chunks."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens scored together; those from ``first`` on count, each given all before it in the window."""

    token_ids: list[int]
    first: int

    @property
    def scored(self) -> int:
        """How many tokens count."""
        return len(self.token_ids) - self.first


class Divergence(BaseModel):
    """Of the reference to the model, per token: KL in nats, agreement of the likeliest token, and ln of the
    ratio of perplexities (model over reference) with the paired standard error.

    ``kl_stretches``: the mean KL of each of up to 256 equal stretches of the text, in their order, so that
    two models that were measured against one reference on one text can be compared in pairs.
    """

    model_config = ConfigDict(extra="forbid")

    reference_perplexity: Estimate
    kl: Estimate
    kl_stretches: list[float] = []
    kl_median: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    same_top1: Estimate
    ln_ppl_ratio: Estimate


class LossRatio(BaseModel):
    """What remains of a :class:`Divergence` where only the text's own tokens have log-probabilities."""

    model_config = ConfigDict(extra="forbid")

    reference_perplexity: Estimate
    ln_ppl_ratio: Estimate


class TextResult(BaseModel):
    """A text's perplexity; ``convention``, ``context_length`` and the tokenizer's hash are part of its name.

    Standard errors treat tokens as independent.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["text"] = "text"
    convention: Convention
    context_length: int
    tokenizer: str
    windows: int
    perplexity: Estimate
    reference: str | None = None  # how the reference was named and run, and its fingerprint
    divergence: Divergence | None = None
    loss_ratio: LossRatio | None = None  # behind an endpoint, in place of the divergence


def windows_of(
    token_ids: Sequence[int], convention: Convention, context_length: int, bos_token_id: int | None = None
) -> list[Window]:
    """Cut a tokenised text into windows.

    ``windows``: one after the other, every token but the first of each counts; the last may be short.
    ``llama.cpp``: full windows only, and of each the tokens after the middle count, as its perplexity tool
    does; ``bos_token_id``, if the model's prompts begin with one, replaces each window's first token.
    Raises InvalidRequestError if the text is too short for a window.
    """
    if context_length < 4:
        raise InvalidRequestError(
            f"A context of {context_length} tokens is too short to score; give 4 or more."
        )
    found = []
    for start in range(0, len(token_ids), context_length):
        tokens = list(token_ids[start : start + context_length])
        if convention == "windows":
            if len(tokens) > 1:
                found.append(Window(tokens, 1))
        elif len(tokens) == context_length:
            if bos_token_id is not None:
                tokens[0] = bos_token_id
            found.append(Window(tokens, context_length // 2 + 1))
    if not found:
        needed = 2 if convention == "windows" else context_length
        raise InvalidRequestError(
            f"The text has {len(token_ids)} tokens; the convention {convention!r} needs {needed} or more."
        )
    return found


def measure(
    windows: Sequence[Window],
    model: LogProbs,
    reference: LogProbs | None = None,
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[Estimate, Divergence | None]:
    """Perplexity of the model and, with a reference, their divergence. ``advance`` is told of scored tokens.

    Holds one chunk of rows of each and four numbers per token. The KL divergence of a token is
    ``sum p_ref (log p_ref - log p_model)`` over the whole vocabulary, in float32 with float64 sums.
    """
    losses: list[NDArray[np.float64]] = []
    pairs: list[_Paired] = []
    for window in windows:
        targets = np.asarray(window.token_ids[window.first :])
        ours = model.log_probs(window.token_ids, window.first)
        if reference is None:
            for start, rows in _located(ours):
                losses.append(-_at(rows, targets[start : start + len(rows)]))
                advance(len(rows))
            continue
        theirs = reference.log_probs(window.token_ids, window.first)
        for start, rows, reference_rows in _aligned(ours, theirs):
            wanted = targets[start : start + len(rows)]
            losses.append(-_at(rows, wanted))
            pairs.append(_pair(rows, reference_rows, wanted))
            advance(len(rows))
    all_losses = np.concatenate(losses)
    if reference is None:
        return perplexity(all_losses), None
    return perplexity(all_losses), _divergence(all_losses, pairs)


@dataclass(frozen=True, slots=True)
class _Paired:
    """Per token: the reference's loss, KL, and whether both find the same token likeliest."""

    losses: NDArray[np.float64]
    kl: NDArray[np.float64]
    same: NDArray[np.bool_]


def _pair(rows: Float32, reference: Float32, targets: NDArray[np.intp]) -> _Paired:
    terms = np.exp(reference)
    terms *= reference - rows
    kl = np.maximum(terms.sum(axis=1, dtype=np.float64), 0.0)  # rounding may leave it a hair below zero
    return _Paired(-_at(reference, targets), kl, rows.argmax(axis=1) == reference.argmax(axis=1))


def _divergence(losses: NDArray[np.float64], pairs: list[_Paired]) -> Divergence:
    kl = np.concatenate([pair.kl for pair in pairs])
    reference_losses = np.concatenate([pair.losses for pair in pairs])
    median, p99, p999 = (float(value) for value in np.percentile(kl, [50, 99, 99.9]))
    return Divergence(
        reference_perplexity=perplexity(reference_losses),
        kl=mean(kl),
        kl_stretches=[float(part.mean()) for part in np.array_split(kl, min(len(kl), _STRETCHES))],
        kl_median=median,
        kl_p99=p99,
        kl_p999=p999,
        kl_max=float(kl.max()),
        same_top1=mean(np.concatenate([pair.same for pair in pairs])),
        ln_ppl_ratio=mean(losses - reference_losses),
    )


def _at(rows: Float32, targets: NDArray[np.intp]) -> NDArray[np.float64]:
    picked: NDArray[np.float64] = rows[np.arange(len(rows)), targets].astype(np.float64)
    return picked


def _located(chunks: Iterable[Float32]) -> Iterator[tuple[int, Float32]]:
    start = 0
    for rows in chunks:
        yield start, rows
        start += len(rows)


def _aligned(ours: Iterator[Float32], theirs: Iterator[Float32]) -> Iterator[tuple[int, Float32, Float32]]:
    """Both streams cut at the same rows, whatever chunks each comes in; both hold equally many rows."""
    start = 0
    left, right = next(ours, None), next(theirs, None)
    while left is not None and right is not None:
        count = min(len(left), len(right))
        yield start, left[:count], right[:count]
        start += count
        left = left[count:] if count < len(left) else next(ours, None)
        right = right[count:] if count < len(right) else next(theirs, None)
    if left is not None or right is not None:
        raise InvalidRequestError("Model and reference were not scored on the same tokens.")
