"""One step's indices as torch tensors on a device, with or without a sampling table behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.backend.batch import BLOCK_SIZE, Batch, Int32


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The fields of :class:`~headrace.backend.batch.Batch` that the network reads; int64 indices."""

    token_ids: torch.Tensor  # [n]
    positions: torch.Tensor  # [n]
    query_start: list[int]  # r + 1
    context_len: list[int]  # r
    slot_mapping: tuple[torch.Tensor, ...]  # g x [n]
    block_tables: tuple[torch.Tensor, ...]  # g x [r, widest]
    logit_rows: torch.Tensor  # [m]

    @classmethod
    def from_batch(cls, batch: Batch, device: torch.device | str = "cpu") -> TorchStep:
        """Copy a batch's indices to ``device``."""

        def index(values: Int32) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            token_ids=index(batch.token_ids),
            positions=index(batch.positions),
            query_start=batch.query_start.tolist(),
            context_len=batch.context_len.tolist(),
            slot_mapping=tuple(index(slots) for slots in batch.slot_mapping),
            block_tables=tuple(index(table) for table in batch.block_tables),
            logit_rows=index(batch.logit_rows),
        )

    @classmethod
    def whole_sequence(
        cls, token_ids: Sequence[int], num_groups: int, device: torch.device | str = "cpu"
    ) -> TorchStep:
        """One sequence from its first token on, every row's logits wanted, blocks ``0, 1, …`` in order."""
        count = len(token_ids)
        rows = torch.arange(count, device=device)
        blocks = torch.arange(-(-count // BLOCK_SIZE), device=device)[None]
        return cls(
            token_ids=torch.tensor(np.asarray(token_ids), dtype=torch.int64, device=device),
            positions=rows,
            query_start=[0, count],
            context_len=[count],
            slot_mapping=(rows,) * num_groups,
            block_tables=(blocks,) * num_groups,
            logit_rows=rows,
        )
