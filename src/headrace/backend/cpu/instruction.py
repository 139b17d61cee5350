"""The native instruction as numpy sees it; mirrors ``struct Instruction`` in native/program.h."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

OPERAND = np.dtype([("base", np.int32), ("unused", np.int32), ("offset", np.int64)])

WEIGHT_FORMAT = np.dtype(
    [
        ("kind", np.int32),
        ("scale_bytes", np.int32),
        ("offsets", np.int32),
        ("group", np.int32),
        ("zero_point", np.int32),
    ]
)

INSTRUCTION = np.dtype(
    [
        ("op", np.int32),
        ("logit_rows", np.int32),
        ("barrier", np.int32),
        ("kv_group", np.int32),
        ("input", OPERAND),
        ("output", OPERAND),
        ("output2", OPERAND),
        ("weight", OPERAND),
        ("weight2", OPERAND),
        ("input_stride", np.int64),
        ("output_stride", np.int64),
        ("kv_offset", np.int64),
        ("format", WEIGHT_FORMAT),
        ("i0", np.int32),
        ("i1", np.int32),
        ("i2", np.int32),
        ("i3", np.int32),
        ("heads", np.int32),
        ("kv_heads", np.int32),
        ("head_dim", np.int32),
        ("window", np.int32),
        ("q_offset", np.int32),
        ("k_offset", np.int32),
        ("v_offset", np.int32),
        ("f0", np.float32),
        ("f1", np.float32),
        ("unused", np.int32),
    ],
    align=True,
)


class Op(IntEnum):
    """What an instruction does; operands as documented beside ``enum Op`` in native/program.h."""

    EMBED = 0
    ANGLES = 1
    NORM = 2
    QUANTISE = 3
    MATMUL = 4
    ROPE = 5
    ATTENTION = 6
    GLU = 7
    SOFTCAP = 8
    SAMPLE = 9
    POOL = 10
    REORDER = 11


class Base(IntEnum):
    """Entries of the base table; KV group g is ``KV + g``."""

    ABSENT = -1
    WEIGHTS = 0
    SCRATCH = 1
    KV = 2
