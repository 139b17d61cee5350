"""KvBlocks: blocks out of a pool that lies as kernels like it, and back into one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backend.kv_format import KVCacheDtype, kv_block_bytes, kv_head_bytes
from headrace.model.architecture import KVGroup

Bytes = NDArray[np.uint8]


EXTENT_BLOCKS = 32  # kExtentBlocks in native/kernels.h


class KvBlocks:
    """A view of one KV group's pool by block.

    The pool lies by the extent of 32 blocks, the last one shorter. In an extent a layer's keys lie head by
    head, each with those of all its blocks, and the layer's values behind them likewise (``KvLayer`` in
    ``native/kernels.h``). Taken out, a block is ``[layers, kv_heads, key bytes]``, and behind that the same
    of its values.
    """

    def __init__(self, pool: Bytes, num_blocks: int, group: KVGroup, kv_cache_dtype: KVCacheDtype) -> None:
        """``pool``: the bytes of ``num_blocks`` blocks."""
        self._pool, self._num_blocks, self._group = pool, num_blocks, group
        self._sizes = kv_head_bytes(group.head_dim, kv_cache_dtype)
        self.block_bytes = kv_block_bytes(group, kv_cache_dtype)

    def read(self, blocks: list[int]) -> Bytes:
        """Copies ``[len(blocks), block_bytes]``."""
        data = np.empty((len(blocks), self.block_bytes), np.uint8)
        for row, block in zip(data, blocks, strict=True):
            for there, here in self._pairs(row, block):
                here[...] = there
        return data

    def write(self, blocks: list[int], data: Bytes) -> None:
        """Put what :meth:`read` gave into blocks."""
        for row, block in zip(data, blocks, strict=True):
            for there, here in self._pairs(row, block):
                there[...] = here

    def _pairs(self, row: Bytes, block: int) -> list[tuple[Bytes, Bytes]]:
        """Keys and values of a block in the pool, and their places in a row."""
        first = block // EXTENT_BLOCKS * EXTENT_BLOCKS
        count = min(EXTENT_BLOCKS, self._num_blocks - first)
        extent = self._pool[first * self.block_bytes : (first + count) * self.block_bytes]
        layers = extent.reshape(len(self._group.layers), -1)
        pairs, start, split = [], 0, 0
        for size in self._sizes:
            end = start + self._group.kv_heads * count * size
            part = layers[:, start:end].reshape(-1, self._group.kv_heads, count, size)[:, :, block - first]
            assert np.shares_memory(part, self._pool)
            pairs.append((part, row[split : split + part.size].reshape(part.shape)))
            start, split = end, split + part.size
        return pairs
