"""Batches for tests of any runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.backend.batch import BLOCK_SIZE, Batch, SamplingTable

LogitRows = Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence: its positions ``start …``, its blocks from position 0 on."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]


def batch_of(pieces: Sequence[Piece], logit_rows: LogitRows = "last", num_groups: int = 1) -> Batch:
    """One step over several sequences, greedy; every KV group uses the same blocks."""
    lengths = [len(piece.token_ids) for piece in pieces]
    positions = [np.arange(piece.start, piece.start + len(piece.token_ids)) for piece in pieces]
    slots = [
        np.asarray(piece.blocks)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        for piece, at in zip(pieces, positions, strict=True)
    ]
    table = np.full((len(pieces), max(len(piece.blocks) for piece in pieces)), -1, np.int32)
    for row, piece in enumerate(pieces):
        table[row, : len(piece.blocks)] = piece.blocks
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = query_start[1:] - 1 if logit_rows == "last" else np.arange(query_start[-1])
    return Batch(
        token_ids=np.concatenate([np.asarray(piece.token_ids) for piece in pieces]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=query_start,
        context_len=np.array(
            [piece.start + length for piece, length in zip(pieces, lengths, strict=True)], np.int32
        ),
        slot_mapping=(np.concatenate(slots).astype(np.int32),) * num_groups,
        block_tables=(table,) * num_groups,
        logit_rows=np.ascontiguousarray(rows, np.int32),
        sampling=SamplingTable.greedy(len(rows)),
    )


def single_batch(
    token_ids: Sequence[int],
    start: int,
    blocks: Sequence[int],
    logit_rows: LogitRows = "last",
    num_groups: int = 1,
) -> Batch:
    """One step over one sequence: its tokens from position ``start`` on, its blocks from position 0 on."""
    return batch_of([Piece(token_ids, start, blocks)], logit_rows, num_groups)
