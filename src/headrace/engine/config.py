"""User-facing settings, in vLLM's words. Pure data: no model is touched here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_MODEL = "smollm2-135m"


@dataclass(slots=True)
class ModelConfig:
    """Which model, and how it is held.

    ``model`` is any reference of the model store. ``quantization`` narrows float weights while loading
    (checkpoints that are quantised already keep their own formats). ``max_model_len`` caps the context, in
    tokens; None takes the model's own, as far as the KV pool holds it.
    """

    model: str = DEFAULT_MODEL
    quantization: Literal["int8", "int4"] | None = None
    max_model_len: int | None = None
    backend: Literal["cpu", "torch"] = "cpu"
    device: str = "cpu"
    threads: int = 0
    seed: int | None = None  # of the generator that seeds requests without a seed; None = from the OS


@dataclass(slots=True)
class CacheConfig:
    """The KV cache: ``kv_cache_memory_bytes`` bounds the pool, ``swap_space`` (GiB) the second tier."""

    block_size: int = 16
    kv_cache_memory_bytes: int = 512 * 2**20
    enable_prefix_caching: bool = True
    swap_space: float = 0.0


@dataclass(slots=True)
class SchedulerConfig:
    """Bounds of one step and of the waiting line."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    max_queue_time_s: float = 60.0
