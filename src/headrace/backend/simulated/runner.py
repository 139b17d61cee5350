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
        num_slots = [settings.blocks_of(group) * BLOCK_SIZE for group in range(len(self._windows))]
        self._slot_tokens = [np.full(count, -1, np.int32) for count in num_slots]
        self._slot_positions = [np.full(count, -1, np.int32) for count in num_slots]
        self.block_bytes = (2 * 4 * BLOCK_SIZE,) * len(self._windows)  # tokens, then positions
        self._logical = np.arange(settings.max_model_len + BLOCK_SIZE, dtype=np.int32)  # positions
        self._block_of, self._offset_of = np.divmod(self._logical, BLOCK_SIZE)
        self._weights = _mix((self._logical.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        self._vocabulary = np.arange(architecture.vocab_size, dtype=np.uint64) * _GOLDEN

    def run(self, batch: Batch) -> StepResult:
        """Write every token to its slots, read every context back, sample. See :class:`Runner`."""
        self._check_shapes(batch)
        for group in range(len(self._windows)):
            self._write(batch, group)
        logits = self.logits(batch)
        if self._latency is not None:
            self._sleep(self._latency.step_s + self._latency.token_s * len(batch.token_ids))
        return sample(logits, batch.sampling)

    def logits(self, batch: Batch) -> Float32:
        """Pseudo-random ``[m, vocab]`` in -8 … 8, from what each logit row's query sees in all groups."""
        owners = batch.query_start.searchsorted(batch.logit_rows, side="right") - 1
        positions = batch.positions[batch.logit_rows, None]
        logical = self._logical[: int(batch.context_len.max())]
        state = np.zeros(len(owners), np.uint64)
        for group, window in enumerate(self._windows):
            tokens = self._slot_tokens[group][self._slots(batch, group)[owners]]
            terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[: len(logical)]
            terms[logical > positions] = 0
            if window is not None:
                terms[logical <= positions - window] = 0
            state = _mix(np.add.reduce(terms, axis=1) + state + np.uint64(group))
        bits = _mix(self._vocabulary + state[:, None]) >> np.uint64(40)
        return bits.astype(np.float32) * np.float32(16 / 2**24) - np.float32(8)

    def read_blocks(self, group: int, blocks: list[int]) -> NDArray[np.uint8]:
        """See :meth:`Runner.read_blocks`."""
        kept = (self._slot_tokens[group], self._slot_positions[group])
        halves = [slots.reshape(-1, BLOCK_SIZE)[blocks] for slots in kept]
        return np.concatenate(halves, axis=1).view(np.uint8)

    def write_blocks(self, group: int, blocks: list[int], data: NDArray[np.uint8]) -> None:
        """See :meth:`Runner.write_blocks`."""
        halves = data.view(np.int32).reshape(len(blocks), 2, BLOCK_SIZE)
        self._slot_tokens[group].reshape(-1, BLOCK_SIZE)[blocks] = halves[:, 0]
        self._slot_positions[group].reshape(-1, BLOCK_SIZE)[blocks] = halves[:, 1]

    def close(self) -> None:
        """Nothing to release."""

    def _check_shapes(self, batch: Batch) -> None:
        n, r, m = len(batch.token_ids), len(batch.context_len), len(batch.logit_rows)
        starts, limits, sampled = batch.query_start, self._settings, batch.sampling.position
        _require(0 < n <= limits.max_batch_tokens, f"{n} tokens in a step")
        _require(
            0 < r <= limits.max_sequences and m <= limits.max_logit_rows, f"{r} sequences, {m} logit rows"
        )
        _require(len(starts) == r + 1 and starts[0] == 0 and starts[-1] == n, "query_start")
        counts = starts[1:] - starts[:-1]
        _require(counts.min() > 0, "a sequence without tokens")
        _require(
            batch.token_ids.min() >= 0 and batch.token_ids.max() < self.architecture.vocab_size, "a token id"
        )
        expected = np.arange(n, dtype=np.int32) + (batch.context_len - starts[1:]).repeat(counts)
        _require(bool((batch.positions == expected).all()), "positions and context_len disagree")
        _require(batch.context_len.max() <= limits.max_model_len, "a context beyond max_model_len")
        _require(len(batch.slot_mapping) == len(batch.block_tables) == len(self._windows), "KV groups")
        next_positions = batch.positions[batch.logit_rows] + 1
        _require(len(sampled) == m and bool((sampled == next_positions).all()), "sampling.position")
        arrays = (batch.token_ids, batch.positions, starts, batch.context_len, batch.logit_rows)
        for array in (*arrays, *batch.slot_mapping, *batch.block_tables):
            _require(
                array.dtype == np.int32 and array.flags.c_contiguous, "an array that is not contiguous int32"
            )

    def _slots(self, batch: Batch, group: int) -> Int32:
        """``[r, longest context]``: where each sequence's table says that each of its positions is."""
        width = int(batch.context_len.max())
        blocks = batch.block_tables[group][:, self._block_of[:width]]
        return blocks * np.int32(BLOCK_SIZE) + self._offset_of[:width]

    def _write(self, batch: Batch, group: int) -> None:
        """Fill the slots of one group, and check that each query finds what was written for its context."""
        tables, slots, window = batch.block_tables[group], batch.slot_mapping[group], self._windows[group]
        _require(
            tables.min() >= 0 and tables.max() < self._settings.blocks_of(group),
            "a block outside of the pool",
        )
        starts, ends = batch.query_start[:-1], batch.context_len[:, None]
        owner = np.arange(len(starts)).repeat(batch.query_start[1:] - starts)
        table_slots = self._slots(batch, group)
        _require(
            bool((slots == table_slots[owner, batch.positions]).all()),
            "slot_mapping and block_tables disagree",
        )
        # A block that is written in this step must belong to its writer alone.
        held = self._logical[: tables.shape[1]] * BLOCK_SIZE < ends
        holders = np.bincount(tables[held])
        _require(int(holders[slots // BLOCK_SIZE].max()) == 1, "a shared block is written")

        self._slot_tokens[group][slots] = batch.token_ids
        self._slot_positions[group][slots] = batch.positions
        logical = self._logical[: table_slots.shape[1]]
        wrong = (self._slot_positions[group][table_slots] != logical) & (logical < ends)
        if window is not None:
            wrong &= logical > (batch.positions[starts] - window)[:, None]
        if wrong.any():
            raise BatchContractError(
                f"The batch breaks its contract: group {group} has other positions at (sequence, position) "
                f"{np.argwhere(wrong).tolist()}."
            )


def _mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BatchContractError(f"The batch breaks its contract: {what}.")
