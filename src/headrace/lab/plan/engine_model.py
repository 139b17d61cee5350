"""How long a step of our own engine takes on this machine: each recorded instruction against what bounds it.

A matrix costs the larger of streaming its packed bytes and of the vector instructions that multiply it;
attention likewise with its KV; what works row by row costs instructions alone. Instructions are counted from
the kernels' source (native/*.cpp) in units of one dot product of 64 bytes, whose rate the machine's measured
ceiling of int8 in vector registers gives. The counts and the constants that no count gives are
:class:`EngineFactors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.cpu.instruction import Op
from headrace.backend.cpu.limits import Limits
from headrace.backend.cpu.packing import F32, LANES, U4, WeightFormat
from headrace.backend.kv_format import kv_layer_bytes
from headrace.lab.plan.hardware import EngineFactors
from headrace.lab.plan.recorded_step import STEP_TOKENS, matrix_bytes

_DOT_MACS = 64  # of one dot product of bytes: sixteen lanes of four
_PAIR_MACS = 32  # of one of bf16 pairs
_GROUP = 32  # inputs of one quantised tile
_ROW_BLOCK = 96  # rows for which a matrix streams past once (native/program.cpp)
_FEW_UNITS = 8  # of attention for each thread: with more, contexts are not split (native/program.cpp)
_PARTITION = 512  # positions of a piece of a context that is split
_QUERY_VECTORS = 16  # rows x heads of one attention unit (native/kernels.h)
_AMX_ROWS = 16  # of a product of matrices, and of outputs
_AMX_FEWEST = 8  # rows that are multiplied so (native/matmul_amx.cpp)


class EngineModel:
    """Seconds of a step, predicted. ``program``: :func:`headrace.lab.plan.recorded_step.record_step`."""

    def __init__(self, program: NDArray[np.void], limits: Limits, factors: EngineFactors) -> None:
        self.limits, self.factors = limits, factors
        self.weight_bytes = matrix_bytes(program)
        self._program = [{name: row[name] for name in row.dtype.names} for row in program]
        self._vocabulary = max(int(row["i0"]) for row in program if row["logit_rows"])
        self._rows_together = 12 if limits.isa.startswith("avx512") else 4
        self._amx = limits.isa == "avx512_amx"

    def decode_step_s(self, sequences: float, context: float) -> float:
        """One token for each of ``sequences``, at ``context`` tokens each."""
        count = max(1, round(sequences))
        return self.step_s([(max(int(context) - 1, 0), 1)] * count, logit_rows=count)

    def prefill_s(self, tokens: int) -> float:
        """A prompt by itself, in steps of 512 tokens, to its first token."""
        total = 0.0
        for start in range(0, tokens, STEP_TOKENS):
            part = min(STEP_TOKENS, tokens - start)
            total += self.step_s([(start, part)], logit_rows=int(start + part == tokens))
        return total

    def step_s(self, sequences: Sequence[tuple[int, int]], logit_rows: int) -> float:
        """A step over ``(first position, tokens)`` of each sequence."""
        rows = sum(tokens for _, tokens in sequences)
        seconds = self.factors.step_s.value
        for row in self._program:
            count = logit_rows if row["logit_rows"] else rows
            if count == 0:
                continue
            if row["op"] == Op.MATMUL:
                seconds += self._matmul_s(row, count)
            elif row["op"] == Op.ATTENTION:
                seconds += self._attention_s(row, sequences)
            else:
                seconds += self._rows_s(row, count)
            if row["barrier"]:
                seconds += self.factors.barrier_s.value
        return seconds

    def prefill_share_s(self, tokens: int) -> float:
        """All of it: one program runs at a time."""
        return self.prefill_s(tokens)

    def _dot_s(self) -> float:
        """One byte dot product of one thread."""
        return _DOT_MACS * self.limits.threads / self.limits.vector_int8_macs_per_s

    def _read_s(self, size: float) -> float:
        """Bytes that come from where the whole of weights comes from."""
        return size / (self.limits.read(self.weight_bytes) * self.factors.bandwidth.value)

    def _matmul_s(self, row: dict[str, np.void], rows: int) -> float:
        form = WeightFormat(*np.asarray(row["format"]).tolist())
        n, k = int(row["i0"]), int(row["i1"])
        tiles = ceil(n / LANES)
        read = self._read_s(form.matrix_bytes(n, k) * ceil(rows / _ROW_BLOCK))
        if form.dense:
            macs = tiles * LANES * k * rows
            rate = self.limits.float32_macs_per_s if form.kind == F32 else self.limits.bf16_macs_per_s
            by_amx = self._amx and form.kind != F32
            work = macs / rate * (self.factors.amx_dense_slots if by_amx else self.factors.dense_slots).value
            return max(read, work)
        unpack = self.factors.unpack4_slots if form.kind == U4 else self.factors.unpack8_slots
        dots = _GROUP * LANES / _DOT_MACS
        scaled = _GROUP // (form.group or _GROUP)  # scales of a tile's inputs: groups of 16 are scaled twice
        each = dots * (1 + self.factors.wide_share.value) + scaled * self.factors.group_slots.value
        chain = self.factors.chain_slots.value
        blocks, few = divmod(rows, _AMX_ROWS) if self._amx else (0, rows)
        if self._amx and few >= _AMX_FEWEST:
            blocks, few = blocks + 1, 0
        slots = blocks * scaled * self.factors.amx_group_slots.value + sum(
            passes * max(unpack.value + together * each, chain)
            for together, passes in _passes(few, self._rows_together)
        )
        return max(read, tiles * (k / _GROUP) * slots * self._dot_s() / self.limits.threads)

    def _attention_s(self, row: dict[str, np.void], sequences: Sequence[tuple[int, int]]) -> float:
        heads, kv_heads, head_dim = int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"])
        window = int(row["window"])
        rows_of_unit = max(1, _QUERY_VECTORS // (heads // kv_heads))
        units = kept = 0
        seen = seen_by_units = 0.0
        for first, tokens in sequences:
            last = first + tokens
            positions = (first + 1 + last) / 2  # tokens that a row sees, on average
            sees = min(positions, window) if window else positions
            seen += tokens * sees
            seen_by_units += ceil(tokens / rows_of_unit) * kv_heads * sees
            kept += min(last, window) if window else last
            units += ceil(tokens / rows_of_unit) * kv_heads
        # sixteen slots of KV: head_dim / 2 pairs for their scores and as many for their values, and a softmax
        blocks = heads * seen / LANES
        work = blocks * self.factors.softmax_slots.value * self._dot_s()
        if self._amx and head_dim % LANES == 0 and heads // kv_heads <= _QUERY_VECTORS:
            products = seen_by_units / LANES * (ceil(head_dim / 32) + head_dim // 16)
            work += products * self.factors.amx_product_slots.value * self._dot_s()
        else:
            work += blocks * head_dim * _PAIR_MACS * self.limits.threads / self.limits.bf16_macs_per_s
        read = self._read_s(kept * kv_layer_bytes(kv_heads, head_dim, "auto") / BLOCK_SIZE)
        read /= self.factors.kv_bandwidth.value
        # units are claimed whole: three of them take two threads as long as four; few are cut into partitions
        pieces = units
        if units <= _FEW_UNITS * self.limits.threads:
            pieces *= ceil(kept / len(sequences) / _PARTITION)
        busiest = ceil(pieces / self.limits.threads) / pieces  # its share of all
        return max(read * self.limits.threads, work) * busiest

    def _rows_s(self, row: dict[str, np.void], rows: int) -> float:
        op, width = int(row["op"]), int(row["i0"])
        factors = self.factors
        slots = factors.row_slots.value
        if op == Op.ROPE:
            width = (int(row["heads"]) + 2 * int(row["kv_heads"])) * int(row["head_dim"])
            slots = factors.rope_slots.value
        elif op == Op.GLU:
            slots = factors.glu_slots.value
        elif op == Op.QUANTISE:
            slots = 0.0
        elif op == Op.SAMPLE:
            width = self._vocabulary
        if op == Op.QUANTISE or (op in (Op.NORM, Op.GLU) and int(np.asarray(row["output2"])["base"]) >= 0):
            slots += factors.quantise_slots.value
        return ceil(rows / self.limits.threads) * width * slots * self._dot_s()


def _passes(rows: int, most: int) -> tuple[tuple[int, int], ...]:
    """``(rows together, how often)``: a tile is unpacked for twelve rows (or four), then fours, then ones."""
    full, rest = divmod(rows, most)
    return (most, full), (4, rest // 4), (1, rest % 4)
