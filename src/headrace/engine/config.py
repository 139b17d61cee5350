"""User-facing settings, in vLLM's words. Pure data: no model is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from headrace.backend.kv_format import KVCacheDtype
from headrace.errors import ConfigError

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
    """The KV cache: ``kv_cache_memory_bytes`` bounds the pool, ``swap_space`` (GiB) the second tier.

    ``kv_tier_path``: a file, or a folder of one for each model, that holds the second tier and is found again
    by the next engine; without ``swap_space`` it may have 4 GiB.
    ``kv_cache_dtype``: what keys and values are kept in; "auto" is bfloat16 on the cpu backend.
    """

    block_size: int = 16
    kv_cache_memory_bytes: int = 512 * 2**20
    enable_prefix_caching: bool = True
    swap_space: float = 0.0
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_tier_path: str | None = None


_OF_NGRAM = ("prompt_lookup_max", "prompt_lookup_min")
_OF_DRAFT_MODEL = ("model", "quantization", "kv_cache_memory_bytes")


@dataclass(slots=True)
class SpeculativeConfig:
    """Speculative decoding, in vLLM's words: drafts are verified, so they never change an answer.

    ``ngram``: prompt lookup. Where the last tokens (at least ``prompt_lookup_min``, preferably
    ``prompt_lookup_max``) have occurred before, what followed then is the draft, with the edits made so far.
    ``draft_model``: what ``model``, any reference of the model store, would say greedily. It has the tokens
    of the model that it drafts for. ``quantization`` is as in :class:`ModelConfig`, and
    ``kv_cache_memory_bytes`` bounds its own KV pool (None: as many tokens as the other pool has).
    Drafts are at most ``num_speculative_tokens`` long. ``adaptive``: fewer or none where it does not pay.
    """

    method: Literal["ngram", "draft_model"] = "ngram"
    num_speculative_tokens: int = 16
    model: str | None = None
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_memory_bytes: int | None = None
    prompt_lookup_max: int = 16
    prompt_lookup_min: int = 3
    adaptive: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """From settings as users write them. Raises ConfigError for a name that does not exist."""
        if settings is None or isinstance(settings, cls):
            return settings
        names = [field.name for field in fields(cls)]
        others = {"ngram": _OF_DRAFT_MODEL, "draft_model": _OF_NGRAM}
        if not isinstance(settings, Mapping) or "method" not in settings:
            raise ConfigError(
                'speculative_config must be an object with a method, such as {"method": "ngram", '
                '"num_speculative_tokens": 8}.',
                param="speculative_config",
            )
        method = settings["method"]
        names = [name for name in names if name not in others.get(str(method), ())]
        for name in settings:
            if name not in names:
                raise ConfigError(
                    f"speculative_config has no {name!r} with method {method!r}; there are "
                    f"{', '.join(names)}.",
                    param="speculative_config",
                )
        chosen = dict(settings)
        longest = chosen.get("prompt_lookup_max")
        if "prompt_lookup_min" not in chosen and type(longest) is int:
            chosen["prompt_lookup_min"] = max(1, min(longest, cls().prompt_lookup_min))
        return cls(**chosen)


@dataclass(slots=True)
class SchedulerConfig:
    """Bounds of one step and of the waiting line, who goes first, and whether steps verify drafts.

    ``priority_aging_s``: a request that has waited so long counts as one level of priority more urgent; 0 =
    never. ``tpot_target_ms``: prompts get only so much of a step that those who decode meanwhile have their
    tokens about so far apart; None = as much as ``max_num_batched_tokens`` leaves.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    max_queue_time_s: float = 60.0
    priority_aging_s: float = 10.0
    tpot_target_ms: float | None = None
    speculative: SpeculativeConfig | None = None


@dataclass(slots=True)
class CheckpointConfig:
    """Where requests are kept, so that another process can go on with them; see docs/checkpoint.md.

    ``path``: a folder of its own. ``interval_s``: what requests have had is written so often. ``grace_s``:
    answers that are complete are kept for so long, and requests that go on after a restart wait so long for
    whoever asked. ``max_bytes``: of complete answers and requests together; the oldest answers go first.
    """

    path: str
    interval_s: float = 0.1
    grace_s: float = 300.0
    max_bytes: int = 256 * 2**20
