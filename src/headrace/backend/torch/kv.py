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
        self._keys = [_store(shape, kept, dtype, device, rotate=True) for shape in shapes]
        self._values = [_store(shape, kept, dtype, device) for shape in shapes]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``[n, kv_heads, head_dim]`` at ``slots [n]``."""
        self._keys[layer].write(slots, keys)
        self._values[layer].write(slots, values)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[len(slots), kv_heads, head_dim]``."""
        return self._keys[layer].read(slots), self._values[layer].read(slots)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block in all layers of a group."""
        return sum(tensor[:BLOCK_SIZE].numel() * tensor.element_size() for tensor in self._kept_by(group))

    def read_blocks(self, group: int, blocks: list[int]) -> torch.Tensor:
        """What is kept of blocks, ``[len(blocks), block_bytes]`` of uint8 on the host: layer by layer."""
        rows = [_by_block(tensor)[blocks].view(torch.uint8) for tensor in self._kept_by(group)]
        return torch.cat(rows, dim=1).cpu()

    def write_blocks(self, group: int, blocks: list[int], data: torch.Tensor) -> None:
        """Fill blocks with what :meth:`read_blocks` gave."""
        start = 0
        for tensor in self._kept_by(group):
            by_block = _by_block(tensor)
            end = start + by_block.shape[1] * tensor.element_size()
            part = data[:, start:end].contiguous().view(tensor.dtype)
            by_block[blocks] = part.to(tensor.device)
            start = end

    def _kept_by(self, group: int) -> list[torch.Tensor]:
        return [
            tensor
            for layer, its_group in enumerate(self.groups)
            if its_group == group
            for store in (self._keys[layer], self._values[layer])
            for tensor in store.kept
        ]


class _Store:
    """Vectors by slot and head, rounded to a float dtype."""

    def __init__(
        self, shape: tuple[int, int, int], kept: torch.dtype, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._data = torch.zeros(shape, dtype=kept, device=device)
        self._dtype = dtype
        self.kept = (self._data,)

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        self._data[slots] = vectors.to(self._data.dtype)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._data[slots].to(self._dtype)


class _Int8Store:
    """Vectors by slot and head in int8, with a float32 scale for each, fixed when it is written.

    ``rotate``: by the Walsh-Hadamard matrix, in blocks of the largest power of two that divides the width, so
    that no feature's outliers set the step of the others (QuaRot, arXiv 2404.00456); turned back when read.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str, *, rotate: bool
    ) -> None:
        self._data = torch.zeros(shape, dtype=torch.int8, device=device)
        self._scales = torch.zeros((*shape[:2], 1), device=device)
        self.kept = (self._data, self._scales)
        self._dtype = dtype
        self._block = shape[2] & -shape[2]
        self._rotation = _hadamard(self._block).to(device) if rotate else None

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        wide = self._rotated(vectors.float())
        largest = wide.abs().amax(-1, keepdim=True)
        counts = largest > _SMALLEST
        inverse = torch.where(counts, 127 / largest, 0.0)
        # Not finite: the scale is NaN, so that it is seen in the logits and not hidden.
        self._scales[slots] = torch.where(counts, largest / 127, 0.0) + (largest - largest)
        self._data[slots] = (wide * inverse).nan_to_num(0.0).round().to(torch.int8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        wide = self._data[slots] * self._scales[slots]
        if self._rotation is not None:
            wide = self._rotated(wide) / self._block
        return wide.to(self._dtype)

    def _rotated(self, vectors: torch.Tensor) -> torch.Tensor:
        if self._rotation is None:
            return vectors
        blocks = vectors.reshape(*vectors.shape[:-1], -1, self._block)
        return (blocks @ self._rotation).flatten(-2)


def _by_block(tensor: torch.Tensor) -> torch.Tensor:
    """``[slots, …]`` as ``[blocks, values of a block]``, a view."""
    return tensor.view(tensor.shape[0] // BLOCK_SIZE, -1)


def _store(
    shape: tuple[int, int, int],
    kept: torch.dtype,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    rotate: bool = False,
) -> _Store | _Int8Store:
    if kept is torch.int8:
        return _Int8Store(shape, dtype, device, rotate=rotate)
    return _Store(shape, kept, dtype, device)


def _hadamard(size: int) -> torch.Tensor:
    """``[size, size]`` of ones and minus ones, Sylvester's; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
