"""The paged KV cache in torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.kv_format import KVCacheDtype
from headrace.model.architecture import LayerSpec

_SMALLEST = 1e-35  # nothing larger counts as zeros: 127 / x must not overflow


class TorchKV:
    """Per layer two stores ``[num_blocks * BLOCK_SIZE, kv_heads, head_dim]``, addressed by slot.

    What is read back is what the format kept, as ``dtype``, in which the network computes; "auto" keeps
    ``dtype`` itself.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self.groups = tuple(layer.kv_group for layer in layers)
        slots = num_blocks * BLOCK_SIZE
        kept = {"auto": dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[kv_cache_dtype]
        shapes = [(slots, layer.attention.kv_heads, layer.attention.head_dim) for layer in layers]
        self._keys = [_Store(shape, kept, dtype, device) for shape in shapes]
        self._values = [_Store(shape, kept, dtype, device) for shape in shapes]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``[n, kv_heads, head_dim]`` at ``slots [n]``."""
        self._keys[layer].write(slots, keys)
        self._values[layer].write(slots, values)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[len(slots), kv_heads, head_dim]``."""
        return self._keys[layer].read(slots), self._values[layer].read(slots)


class _Store:
    """Vectors by slot and head; int8 has a float32 scale for each, fixed when it is written."""

    def __init__(
        self, shape: tuple[int, int, int], kept: torch.dtype, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._data = torch.zeros(shape, dtype=kept, device=device)
        self._dtype = dtype
        self._scales = torch.zeros((*shape[:2], 1), device=device) if kept is torch.int8 else None

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        if self._scales is None:
            self._data[slots] = vectors.to(self._data.dtype)
            return
        wide = vectors.float()
        largest = wide.abs().amax(-1, keepdim=True)
        counts = largest > _SMALLEST
        inverse = torch.where(counts, 127 / largest, 0.0)
        # Not finite: the scale is NaN, so that it is seen in the logits and not hidden.
        self._scales[slots] = torch.where(counts, largest / 127, 0.0) + (largest - largest)
        self._data[slots] = (wide * inverse).nan_to_num(0.0).round().to(torch.int8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        if self._scales is None:
            return self._data[slots].to(self._dtype)
        return (self._data[slots] * self._scales[slots]).to(self._dtype)
