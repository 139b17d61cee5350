"""Scorer: the log-probabilities that a loaded model gives to known tokens, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.backend import open_runner
from headrace.backend.batch import BLOCK_SIZE, Batch, Float32, SamplingTable
from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import Runner, RunnerSettings
from headrace.closing import Closing
from headrace.errors import ContextLengthError, GenerationError, InvalidRequestError
from headrace.model.weights import open_checkpoint

_CHUNK_LOGITS = 2**22  # logits computed at a time: 16 MiB of float32, whatever the vocabulary
_MIN_ROWS, _MAX_ROWS = 8, 128


class LogitsRunner(Runner, Protocol):
    """A runner that shows its logits: the cpu and the torch backend do."""

    def logits(self, batch: Batch) -> Float32:
        """Run a step; its logits ``[m, vocab]``."""
        ...


class Scorer(Closing):
    """Scores one sequence at a time on a runner of its own. Close it when done.

    ``max_tokens``: the longest sequence that it can score.
    """

    def __init__(self, runner: LogitsRunner, max_tokens: int, rows: int) -> None:
        self.runner = runner
        self.max_tokens = max_tokens
        self.vocab_size = runner.architecture.vocab_size
        self._rows = rows
        self._groups = len(runner.architecture.kv_groups)

    def log_probs(self, token_ids: Sequence[int], first: int = 1) -> Iterator[Float32]:
        """Log-softmax rows ``[rows, vocab]``, float32, for the tokens at positions ``first …`` in order.

        Row ``i`` is the distribution of token ``first + i`` given all tokens before it. Chunks are small:
        about 16 MiB each. Raises InvalidRequestError for ids outside of the vocabulary or ``first`` outside
        of the sequence, ContextLengthError for a sequence that is too long, GenerationError if the model
        gives numbers that are not finite.
        """
        self._check(token_ids)
        if not 1 <= first <= len(token_ids):
            raise InvalidRequestError(f"first must be from 1 to {len(token_ids)}, not {first}.")
        for start, stop in _chunks(0, len(token_ids) - 1, self._rows):
            wanted = range(max(start, first - 1), stop)  # the row at position p predicts token p + 1
            logits = self._step(token_ids[start:stop], start, wanted)
            if len(wanted):
                yield log_softmax(logits)

    def continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Log-probabilities of each continuation's tokens after ``context``, which is computed once.

        Every continuation needs a token, and the context too. Raises as :meth:`log_probs` does.
        """
        return [scores for scores, _ in self.greedy_continuations(context, continuations)]

    def greedy_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[NDArray[np.float64], bool]]:
        """As :meth:`continuations`, each with whether greedy decoding would have written it."""
        for continuation in continuations:
            if not context or not continuation:
                raise InvalidRequestError("Context and continuation need at least one token each.")
            self._check([*context, *continuation])
        for start, stop in _chunks(0, len(context) - 1, self._rows):
            self._step(context[start:stop], start, range(0))
        scores = []
        for continuation in continuations:
            # The context's last token is run again with each: its row predicts the first token. What an
            # earlier continuation left in the KV cache lies beyond what this one can see.
            whole = [context[-1], *continuation]
            base = len(context) - 1
            found, greedy = [], True
            for start, stop in _chunks(0, len(continuation), self._rows):
                rows = log_softmax(
                    self._step(whole[start:stop], base + start, range(base + start, base + stop))
                )
                wanted = whole[start + 1 : stop + 1]
                found.append(rows[np.arange(stop - start), wanted])
                greedy = greedy and bool((rows.argmax(axis=1) == wanted).all())
            scores.append((np.concatenate(found).astype(np.float64), greedy))
        return scores

    def close(self) -> None:
        """Release the model."""
        self.runner.close()

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids or not all(0 <= token < self.vocab_size for token in token_ids):
            raise InvalidRequestError(f"Tokens to score must be ids from 0 to {self.vocab_size - 1}.")
        if len(token_ids) > self.max_tokens:
            raise ContextLengthError(
                f"{len(token_ids)} tokens are to be scored at once, the context is {self.max_tokens}."
            )

    def _step(self, token_ids: Sequence[int], start: int, wanted: range) -> Float32:
        """Logits of the ``wanted`` positions; tokens go to positions ``start …`` of the one sequence."""
        count = len(token_ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        table = np.arange(-(-(start + count) // BLOCK_SIZE), dtype=np.int32)[None]
        batch = Batch(
            token_ids=np.asarray(token_ids, np.int32),
            positions=positions,
            query_start=np.array([0, count], np.int32),
            context_len=np.array([start + count], np.int32),
            slot_mapping=(positions,) * self._groups,
            block_tables=(table,) * self._groups,
            logit_rows=np.arange(wanted.start - start, wanted.stop - start, dtype=np.int32)
            if len(wanted)
            else np.zeros(0, np.int32),
            sampling=SamplingTable.greedy(len(wanted)),
        )
        logits = self.runner.logits(batch)
        if not np.isfinite(logits).all():
            raise GenerationError(
                f"The model gave logits that are not finite after {start + count} tokens: its weights are "
                "damaged, or its computation overflows."
            )
        return logits


def open_scorer(
    path: Path,
    *,
    max_tokens: int,
    quantization: Literal["int8", "int4"] | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    backend: Literal["cpu", "torch"] = "cpu",
    device: str = "cpu",
    threads: int = 0,
) -> Scorer:
    """Load the model at ``path`` for scoring sequences of up to ``max_tokens`` (or its own limit).

    Raises what opening a checkpoint and loading it raise.
    """
    checkpoint = open_checkpoint(path, quantization=quantization)
    architecture = checkpoint.architecture
    max_tokens = min(max_tokens, architecture.max_positions)
    rows = max(_MIN_ROWS, min(_MAX_ROWS, _CHUNK_LOGITS // architecture.vocab_size))
    settings = RunnerSettings(
        num_blocks=-(-max_tokens // BLOCK_SIZE),
        max_batch_tokens=rows,
        max_sequences=rows,
        max_model_len=max_tokens,
        threads=threads,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
    )
    runner = open_runner(checkpoint, backend, settings)
    return Scorer(cast(LogitsRunner, runner), max_tokens, rows)


def log_softmax(logits: Float32) -> Float32:
    """Row-wise log-softmax ``[rows, vocab]`` in float32; the sum of exponentials in float64."""
    shifted: Float32 = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    return shifted


def _chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
