"""KvBlocks: blocks out of a pool that lies as kernels like it, and back into one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backend.kv_format import KVCacheDtype, kv_head_bytes
from headrace.model.architecture import KVGroup

Bytes = NDArray[np.uint8]


class KvBlocks:
    """A view of one KV group's pool by block.

    In the pool a layer's keys lie head by head, each with those of all blocks, and its values behind them
    likewise (``KvLayer`` in ``native/kernels.h``). Taken out, a block is ``[layers, kv_heads, key bytes]``,
    and behind that the same of its values.
    """

    def __init__(self, pool: Bytes, num_blocks: int, group: KVGroup, kv_cache_dtype: KVCacheDtype) -> None:
        """``pool``: the bytes of ``num_blocks`` blocks."""
        self._parts: list[Bytes] = []  # [layers, kv_heads, blocks, bytes] of keys and of values
        layers = pool.reshape(len(group.layers), -1)
        start = 0
        for size in kv_head_bytes(group.head_dim, kv_cache_dtype):
            end = start + group.kv_heads * num_blocks * size
            self._parts.append(layers[:, start:end].reshape(-1, group.kv_heads, num_blocks, size))
            start = end
        assert all(np.shares_memory(part, pool) for part in self._parts)
        self.block_bytes = sum(part[:, :, 0].size for part in self._parts)

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
        keys, values = (part[:, :, block] for part in self._parts)
        split = keys.size
        return [(keys, row[:split].reshape(keys.shape)), (values, row[split:].reshape(values.shape))]
