"""SimulatedRunner: keeps what real kernels would keep in every KV slot, and lets it decide the tokens.

Each slot holds the token and the position that were written to it. A sequence's logits are a hash of all the
tokens that it reads back through its block tables, so that any mix-up of blocks changes the output, and a
batch that breaks the contract of :mod:`headrace.backend.batch` is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Batch, Float32, Int32, StepResult
from headrace.backend.runner import Capabilities, RunnerSettings
from headrace.backend.sampling import sample
from headrace.model.architecture import Architecture, AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec

UInt64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a step takes: ``step_s`` plus ``token_s`` for each of its tokens, in seconds."""

    step_s: float = 0.0
    token_s: float = 0.0


def simulated_architecture(
    *, vocab_size: int = 64, max_positions: int = 4096, windows: tuple[int | None, ...] = (None,)
) -> Architecture:
    """A network of one small layer for each KV group; ``windows`` are the groups' attention windows."""
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(heads=1, kv_heads=1, head_dim=8, rope=None, scale=1.0, window=window),
            feed_forward=FeedForwardSpec(width=8),
            norm=NormSpec(),
            kv_group=group,
        )
        for group, window in enumerate(windows)
    )
    return Architecture(
        family="simulated",
        vocab_size=vocab_size,
        hidden_size=8,
        max_positions=max_positions,
        layers=layers,
        final_norm=NormSpec(),
        tied_head=True,
    )


class BatchContractError(Exception):
    """The engine handed over a batch that no backend could execute rightly."""


class SimulatedRunner:
    """A Runner without weights, for any architecture.

    ``latency`` is spent by calling ``sleep`` with seconds, so that a simulator can pass its own clock.
    """

    def __init__(
        self,
        architecture: Architecture,
        settings: RunnerSettings,
        *,
        latency: Latency | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.architecture = architecture
        self.capabilities = Capabilities(
            backend="simulated",
            isa="none",
            batch_invariant=True,
            kv_dtype="tokens",
            threads=1,
            fingerprint=f"simulated-{architecture.vocab_size}",
        )
        self._settings = settings
        self._latency = latency
        self._sleep = sleep
        self._windows = tuple(group.window for group in architecture.kv_groups)
        num_slots = settings.num_blocks * BLOCK_SIZE
        self._slot_tokens = [np.full(num_slots, -1, np.int32) for _ in self._windows]
        self._slot_positions = [np.full(num_slots, -1, np.int32) for _ in self._windows]
        self._weights = _mix(np.arange(1, settings.max_model_len + 1, dtype=np.uint64) * _GOLDEN)
        self._vocabulary = np.arange(architecture.vocab_size, dtype=np.uint64) * _GOLDEN

    def run(self, batch: Batch) -> StepResult:
        """Write every token to its slots, read every context back, sample. See :class:`Runner`."""
        self._check_shapes(batch)
        for group, slots in enumerate(batch.slot_mapping):
            self._check_slots(batch, group)
            self._slot_tokens[group][slots] = batch.token_ids
            self._slot_positions[group][slots] = batch.positions
        self._check_contexts(batch)
        logits = np.empty((len(batch.logit_rows), self.architecture.vocab_size), np.float32)
        owners = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
        for i, (row, owner) in enumerate(zip(batch.logit_rows.tolist(), owners.tolist(), strict=True)):
            logits[i] = self.logits(batch, owner, int(batch.positions[row]))
        if self._latency is not None:
            self._sleep(self._latency.step_s + self._latency.token_s * len(batch.token_ids))
        return sample(logits, batch.sampling)

    def logits(self, batch: Batch, sequence: int, position: int) -> Float32:
        """Pseudo-random ``[vocab]`` in -8 … 8, from what the query at ``position`` sees in all groups."""
        state = np.uint64(0)
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, position - window + 1)
            tokens, _ = self._read(batch, group, sequence, first, position + 1)
            terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[first : position + 1]
            state = _mix(np.array([np.add.reduce(terms)]) + state + np.uint64(group))[0]
        bits = _mix(self._vocabulary + state) >> np.uint64(40)
        return bits.astype(np.float32) * np.float32(16 / 2**24) - np.float32(8)

    def close(self) -> None:
        """Nothing to release."""

    def _read(self, batch: Batch, group: int, sequence: int, first: int, stop: int) -> tuple[Int32, Int32]:
        """Tokens and positions found at logical positions ``first:stop`` of a sequence."""
        logical = np.arange(first, stop)
        slots = batch.block_tables[group][sequence, logical // BLOCK_SIZE] * BLOCK_SIZE + logical % BLOCK_SIZE
        return self._slot_tokens[group][slots], self._slot_positions[group][slots]

    def _check_shapes(self, batch: Batch) -> None:
        n, r, m = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
        _require(0 < n <= self._settings.max_batch_tokens, f"{n} tokens in a step")
        _require(0 < r <= self._settings.max_sequences and m <= r, f"{r} sequences, {m} logit rows")
        starts = batch.query_start
        _require(len(starts) == r + 1 and starts[0] == 0 and starts[-1] == n, "query_start")
        _require(bool((np.diff(starts) > 0).all()), "a sequence without tokens")
        _require(
            bool(((batch.token_ids >= 0) & (batch.token_ids < self.architecture.vocab_size)).all()), "ids"
        )
        counts = np.diff(starts)
        expected = np.arange(n) - np.repeat(starts[1:], counts) + np.repeat(batch.context_len, counts)
        _require(np.array_equal(batch.positions, expected), "positions and context_len disagree")
        _require(
            bool((batch.context_len <= self._settings.max_model_len).all()), "a context beyond max_model_len"
        )
        _require(len(batch.slot_mapping) == len(batch.block_tables) == len(self._windows), "KV groups")
        table = batch.sampling
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position", "num_logprobs"):
            _require(len(getattr(table, name)) == m, f"sampling.{name}")
        _require(bool((table.position == batch.positions[batch.logit_rows] + 1).all()), "sampling.position")
        arrays = [batch.token_ids, batch.positions, starts, batch.context_len, batch.logit_rows]
        for array in (*arrays, *batch.slot_mapping, *batch.block_tables):
            _require(
                array.dtype == np.int32 and array.flags.c_contiguous, "an array that is not contiguous int32"
            )

    def _check_slots(self, batch: Batch, group: int) -> None:
        counts = np.diff(batch.query_start)
        owner = np.repeat(np.arange(len(counts)), counts)
        tables, slots = batch.block_tables[group], batch.slot_mapping[group]
        _require(
            tables.min() >= 0 and tables.max() < self._settings.num_blocks, "a block outside of the pool"
        )
        expected = tables[owner, batch.positions // BLOCK_SIZE] * BLOCK_SIZE + batch.positions % BLOCK_SIZE
        _require(np.array_equal(slots, expected), "slot_mapping and block_tables disagree")
        # A block that is written in this step must belong to its writer alone.
        held = np.arange(tables.shape[1]) * BLOCK_SIZE < batch.context_len[:, None]
        holders = np.bincount(tables[held], minlength=self._settings.num_blocks)
        _require(bool((holders[slots // BLOCK_SIZE] == 1).all()), "a shared block is written")

    def _check_contexts(self, batch: Batch) -> None:
        counts = np.diff(batch.query_start).tolist()
        for group, window in enumerate(self._windows):
            for sequence, (stop, count) in enumerate(zip(batch.context_len.tolist(), counts, strict=True)):
                first = 0 if window is None else max(0, stop - count - window + 1)
                _, positions = self._read(batch, group, sequence, first, stop)
                _require(
                    np.array_equal(positions, np.arange(first, stop)),
                    f"group {group}: {stop} tokens of sequence {sequence} are at {positions.tolist()}",
                )


def _mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BatchContractError(f"The batch breaks its contract: {what}.")
