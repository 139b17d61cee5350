"""The paged KV cache in torch tensors, in the dtype that the network computes in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.backend.batch import BLOCK_SIZE
from headrace.model.architecture import LayerSpec


class TorchKV:
    """Per layer two tensors ``[num_blocks * BLOCK_SIZE, kv_heads, head_dim]``, addressed by slot."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.groups = tuple(layer.kv_group for layer in layers)
        slots = num_blocks * BLOCK_SIZE
        shapes = [(slots, layer.attention.kv_heads, layer.attention.head_dim) for layer in layers]
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``[n, kv_heads, head_dim]`` at ``slots [n]``."""
        self._keys[layer][slots] = keys
        self._values[layer][slots] = values

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[len(slots), kv_heads, head_dim]``."""
        return self._keys[layer][slots], self._values[layer][slots]
