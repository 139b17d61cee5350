"""How keys and values are kept: their formats and what a block of each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.model.architecture import KVGroup

KVCacheDtype = Literal["auto", "bfloat16", "int8"]
"""``auto`` is the backend's own: bfloat16 on cpu, what it computes in on torch."""

KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "bfloat16", "int8")
KV_LAYOUT = 1
"""Of blocks as ``Runner.read_blocks`` gives them: raised whenever their bytes mean something else."""

_SCALE_BYTES = 4  # float32, one a slot and head for K and one for V


def check_kv_cache_dtype(value: object) -> None:
    """Raise ConfigError unless ``value`` names a format."""
    if value not in KV_CACHE_DTYPES:
        shown = ", ".join(repr(choice) for choice in KV_CACHE_DTYPES)
        raise ConfigError(f"kv_cache_dtype must be one of {shown}, not {value!r}.", param="kv_cache_dtype")


def kv_head_bytes(head_dim: int, kv_cache_dtype: KVCacheDtype) -> tuple[int, int]:
    """Bytes of one head's keys, and of its values, in one block of the cpu backend (``native/kernels.h``)."""
    from headrace.backend.batch import BLOCK_SIZE  # and numpy, which the settings alone do not need

    if kv_cache_dtype != "int8":
        return 2 * BLOCK_SIZE * head_dim, 2 * BLOCK_SIZE * head_dim
    return (
        BLOCK_SIZE * (-(-head_dim // 4) * 4 + _SCALE_BYTES),
        BLOCK_SIZE * (head_dim + _SCALE_BYTES),
    )


def kv_layer_bytes(kv_heads: int, head_dim: int, kv_cache_dtype: KVCacheDtype) -> int:
    """Bytes of one layer in one block of the cpu backend: K and V of 16 slots."""
    return kv_heads * sum(kv_head_bytes(head_dim, kv_cache_dtype))


def kv_block_bytes(group: KVGroup, kv_cache_dtype: KVCacheDtype) -> int:
    """Bytes of one block of a KV group: all of its layers."""
    return len(group.layers) * kv_layer_bytes(group.kv_heads, group.head_dim, kv_cache_dtype)
