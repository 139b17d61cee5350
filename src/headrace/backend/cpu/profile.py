"""Where a step's time goes: seconds, bytes and multiply-accumulates of each kind of operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Batch
from headrace.backend.cpu.instruction import Op
from headrace.backend.cpu.packing import F32, WeightFormat
from headrace.backend.kv_format import kv_layer_bytes


@dataclass(slots=True)
class OpProfile:
    """One kind of operation, all layers together.

    ``macs`` are of the type ``multiplies``. ``read_bytes``: weights, and K and V of the context, each counted
    once a step; activations are not counted, because they stay in caches.
    """

    kind: str
    multiplies: str
    seconds: float = 0.0
    read_bytes: int = 0
    macs: int = 0


def profile_of(
    instructions: NDArray[Any], seconds: Iterable[float], batch: Batch, steps: int
) -> list[OpProfile]:
    """Means over ``steps`` runs of one ``batch``, whose instructions took ``seconds`` in all.

    Slowest first.
    """
    kinds: dict[str, OpProfile] = {}
    for instruction, spent in zip(instructions, seconds, strict=True):
        op = Op(int(instruction["op"]))
        name, multiplies, read_bytes, macs = op.name.lower(), "", 0, 0
        if op is Op.MATMUL:
            name = "output head" if instruction["logit_rows"] else "matmul"
            multiplies, read_bytes, macs = _matmul(instruction, batch)
        elif op is Op.ATTENTION:
            multiplies = "int8" if instruction["i1"] else "bf16"
            read_bytes, macs = _attention(instruction, batch)
        found = kinds.setdefault(name, OpProfile(name, multiplies))
        found.seconds += spent / steps
        found.read_bytes += read_bytes
        found.macs += macs
    return sorted(kinds.values(), key=lambda kind: -kind.seconds)


def _matmul(instruction: Any, batch: Batch) -> tuple[str, int, int]:
    outputs, inputs, weights = int(instruction["i0"]), int(instruction["i1"]), instruction["format"]
    rows = len(batch.logit_rows if instruction["logit_rows"] else batch.token_ids)
    form = WeightFormat(*weights.tolist())
    multiplies = "int8"
    if form.dense:
        multiplies = "float32" if form.kind == F32 else "bf16"
    return multiplies, form.matrix_bytes(outputs, inputs), rows * outputs * inputs


def _attention(instruction: Any, batch: Batch) -> tuple[int, int]:
    window, whole = int(instruction["window"]), bool(instruction["i0"])
    seen = batch.positions.astype(np.int64) + 1
    if whole:
        seen = np.repeat(batch.context_len, np.diff(batch.query_start)).astype(np.int64)
    context = batch.context_len.astype(np.int64)
    if window:
        reach = np.diff(batch.query_start) - 1 + window
        seen, context = np.minimum(seen, window), np.minimum(context, reach)
    kv_heads, head_dim, int8 = int(instruction["kv_heads"]), int(instruction["head_dim"]), instruction["i1"]
    read_bytes = int(context.sum()) * kv_layer_bytes(kv_heads, head_dim, "int8" if int8 else "bfloat16")
    macs = int(seen.sum()) * int(instruction["heads"]) * head_dim * 2
    # Over int8, queries and weights are two bytes, multiplied one after the other.
    return read_bytes // BLOCK_SIZE, macs * 2 if int8 else macs
