"""From settings to an engine: how many blocks fit, how long a context may be, whether memory suffices."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import msgspec

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.kv_format import KVCacheDtype, check_kv_cache_dtype
from headrace.backend.runner import RunnerSettings
from headrace.engine.config import (
    CacheConfig,
    CheckpointConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from headrace.engine.draft_build import plan_draft
from headrace.engine.engine import Engine
from headrace.engine.kv_cache import blocks_for
from headrace.engine.memory import block_bytes, check_memory, group_block_bytes
from headrace.errors import ConfigError
from headrace.model.architecture import Architecture

SPARE_LOGIT_ROWS = 32  # of a step beyond one a sequence, shared by drafts and prompt logprobs
MAX_DRAFT_TOKENS = 64
MAX_LOOKUP = 64
MAX_SWAP_SPACE = 2**20


class CheckpointSpec(msgspec.Struct, kw_only=True, tag="checkpoint"):
    """What :func:`build_engine` needs, as plain data: it can be sent to an engine process."""

    path: str
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig

    def build(self) -> Engine:
        """Load the model; see :func:`build_engine`."""
        return build_engine(Path(self.path), self.model, self.cache, self.scheduler)


class SimulatedSpec(msgspec.Struct, kw_only=True, tag="simulated"):
    """An engine without weights (see :mod:`headrace.backend.simulated`): for simulators and load tests."""

    num_blocks: int
    max_model_len: int
    scheduler: SchedulerConfig
    vocab_size: int = 64
    windows: list[int | None] = msgspec.field(default_factory=lambda: [None])  # of each KV group
    prefix_caching: bool = True
    seed: int | None = None
    step_s: float = 0.0
    token_s: float = 0.0

    def build(self) -> Engine:
        """An engine of these sizes."""
        from headrace.backend.simulated import Latency, SimulatedRunner, simulated_architecture

        check_scheduler_config(self.scheduler)
        architecture = simulated_architecture(
            vocab_size=self.vocab_size, max_positions=self.max_model_len, windows=tuple(self.windows)
        )
        settings = _runner_settings(self.num_blocks, self.max_model_len, self.scheduler, 1, "cpu")
        latency = Latency(self.step_s, self.token_s) if self.step_s or self.token_s else None
        runner = SimulatedRunner(architecture, settings, latency=latency)
        return Engine(runner, settings, self.scheduler, prefix_caching=self.prefix_caching, seed=self.seed)


EngineSpec = CheckpointSpec | SimulatedSpec


def build_engine(path: Path, model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig) -> Engine:
    """Open the model at ``path`` (a file or a folder) and make an engine of it.

    A draft model is a path here, too, and its tokens are taken to be the same.
    Raises ConfigError for settings that cannot be met, OutOfMemoryError (before loading) when memory does not
    suffice, ModelNotFoundError and ModelFormatError for what is at ``path``.
    """
    check_model_config(model)
    check_cache_config(cache)
    check_scheduler_config(scheduler)
    from headrace.backend import open_runner
    from headrace.model.weights import open_checkpoint

    checkpoint = open_checkpoint(path, quantization=model.quantization)
    architecture = checkpoint.architecture
    num_blocks = blocks_in_pool(architecture, cache)
    group_blocks: tuple[int, ...] = ()
    longest, asked = architecture.max_positions, model.max_model_len
    if asked is not None and architecture.encoder is None:
        num_blocks, group_blocks = blocks_by_window(architecture, cache, scheduler, min(asked, longest))
    if architecture.encoder is not None:
        num_blocks = min(num_blocks, _blocks_of_a_step(scheduler))
        if asked is None:
            longest = architecture.encoder.max_tokens
    max_model_len = min(longest, num_blocks * BLOCK_SIZE)
    if asked is not None:
        max_model_len = min(max_model_len, asked)
    if architecture.encoder is not None and max_model_len > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but an encoder computes a text "
            f"in one step, and texts may have {max_model_len} tokens: give at least as many.",
            param="max_num_batched_tokens",
        )
    settings = _runner_settings(
        num_blocks,
        max_model_len,
        scheduler,
        model.threads,
        model.device,
        group_blocks,
        cache.kv_cache_dtype,
    )
    draft = plan_draft(scheduler.speculative, architecture, settings)
    if model.backend == "cpu":  # torch asks its own device
        check_memory(checkpoint, model, settings, draft)
    caching = cache.enable_prefix_caching
    with contextlib.ExitStack() as opened:
        runner = open_runner(checkpoint, model.backend, settings)
        opened.callback(runner.close)
        tier = None
        if cache.swap_space or cache.kv_tier_path is not None:
            from headrace.engine.kv_tier_build import open_tier

            tier = open_tier(cache, runner, model.device)
        if tier is not None:
            opened.callback(tier.close)
        drafter = None if draft is None else draft.open(model.backend, architecture.vocab_size, caching)
        opened.pop_all()
    return Engine(
        runner, settings, scheduler, prefix_caching=caching, seed=model.seed, drafter=drafter, tier=tier
    )


def blocks_in_pool(architecture: Architecture, cache: CacheConfig) -> int:
    """Blocks in each KV group that ``kv_cache_memory_bytes`` pays for. Raises ConfigError if not even one."""
    size = block_bytes(architecture, cache.kv_cache_dtype)
    num_blocks = cache.kv_cache_memory_bytes // size
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes (--kv-cache-memory) is {cache.kv_cache_memory_bytes}, but one block of "
            f"{BLOCK_SIZE} tokens takes {size} bytes with this model: give at least that, better a thousand "
            "times as much."
        )
    return num_blocks


def blocks_by_window(
    architecture: Architecture, cache: CacheConfig, scheduler: SchedulerConfig, longest: int
) -> tuple[int, tuple[int, ...]]:
    """Blocks of the groups without a window, and of each group where those with one get by with fewer.

    Fewer are enough for the longest prompt, of ``longest`` tokens, while it is computed, and for the window
    of every other sequence. What that saves goes to the groups that hold whole sequences. Without such
    groups, or where nothing is saved, all have the same number, and () says so.
    """
    equal = blocks_in_pool(architecture, cache)
    groups, sizes = architecture.kv_groups, group_block_bytes(architecture, cache.kv_cache_dtype)
    windows = [group.window for group in groups]
    if None not in windows:
        return equal, ()
    fewer = [
        blocks_for(longest) + scheduler.max_num_seqs * (blocks_for(window) + 2) + 1 if window else equal
        for window in windows
    ]
    if all(count >= equal for count in fewer):
        return equal, ()
    windowed = sum(
        min(count, equal) * size
        for count, size, window in zip(fewer, sizes, windows, strict=True)
        if window is not None
    )
    whole = sum(size for size, window in zip(sizes, windows, strict=True) if window is None)
    num_blocks = (cache.kv_cache_memory_bytes - windowed) // whole
    return num_blocks, tuple(
        num_blocks if window is None else min(count, equal)
        for count, window in zip(fewer, windows, strict=True)
    )


def _blocks_of_a_step(scheduler: SchedulerConfig) -> int:
    """What an encoder can use: its blocks are free again after every step."""
    return scheduler.max_num_batched_tokens // BLOCK_SIZE + scheduler.max_num_seqs + 1


def check_model_config(model: ModelConfig) -> None:
    """Raise ConfigError naming the first setting that is wrong."""
    _one_of("quantization", model.quantization, (None, "int8", "int4"))
    _one_of("backend", model.backend, ("cpu", "torch"))
    if model.backend == "cpu" and model.device != "cpu":
        raise ConfigError(
            f"The cpu backend has no device {model.device!r}; choose backend 'torch'.", param="device"
        )
    if model.max_model_len is not None:
        _whole("max_model_len", model.max_model_len, 2)
    _whole("threads", model.threads, 0)
    if model.seed is not None:
        _whole("seed", model.seed, -(2**63))


def check_cache_config(cache: CacheConfig) -> None:
    """Raise ConfigError naming the first setting that is wrong."""
    if cache.block_size != BLOCK_SIZE:
        raise ConfigError(f"block_size must be {BLOCK_SIZE}, not {cache.block_size!r}.", param="block_size")
    _whole("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 1)
    _one_of("enable_prefix_caching", cache.enable_prefix_caching, (True, False))
    _seconds_or_size("swap_space", cache.swap_space)
    if cache.swap_space > MAX_SWAP_SPACE:
        raise ConfigError(
            f"swap_space must be a number from 0 to {MAX_SWAP_SPACE} GiB, not {cache.swap_space:g}.",
            param="swap_space",
        )
    path = cache.kv_tier_path
    if path is not None and not (type(path) is str and path and "\0" not in path):
        raise ConfigError(
            f"kv_tier_path must be the path of a file or folder, not {path!r}.", param="kv_tier_path"
        )
    if path is not None and not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_tier_path (--kv-tier-path) keeps what prefix caching finds again: leave prefix caching on, "
            "or the path out.",
            param="kv_tier_path",
        )
    check_kv_cache_dtype(cache.kv_cache_dtype)


def check_scheduler_config(scheduler: SchedulerConfig) -> None:
    """Raise ConfigError naming the first setting that is wrong."""
    _whole("max_num_seqs", scheduler.max_num_seqs, 1)
    _whole("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1)
    _whole("max_waiting", scheduler.max_waiting, 1)
    _seconds_or_size("max_queue_time_s", scheduler.max_queue_time_s)
    _seconds_or_size("priority_aging_s", scheduler.priority_aging_s)
    if scheduler.tpot_target_ms is not None:
        _seconds_or_size("tpot_target_ms", scheduler.tpot_target_ms)
    if scheduler.speculative is not None:
        check_speculative_config(scheduler.speculative)


def check_checkpoint_config(checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError naming the first setting that is wrong."""
    if not isinstance(checkpoint.path, str) or not checkpoint.path:
        raise ConfigError(
            f"checkpoint_path must name a folder, not {checkpoint.path!r}.", param="checkpoint_path"
        )
    _seconds_or_size("interval_s", checkpoint.interval_s)
    _seconds_or_size("grace_s", checkpoint.grace_s)
    _whole("max_bytes", checkpoint.max_bytes, 0)


def check_speculative_config(speculative: SpeculativeConfig) -> None:
    """Raise ConfigError naming the first setting that is wrong."""
    _one_of("method", speculative.method, ("ngram", "draft_model"))
    _whole("num_speculative_tokens", speculative.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
    _whole("prompt_lookup_max", speculative.prompt_lookup_max, 1, MAX_LOOKUP)
    _whole("prompt_lookup_min", speculative.prompt_lookup_min, 1, MAX_LOOKUP)
    _one_of("adaptive", speculative.adaptive, (True, False))
    if speculative.method == "draft_model" and not (speculative.model and type(speculative.model) is str):
        raise ConfigError(
            f"model must name the model that drafts, such as a smaller one of the same family, not "
            f"{speculative.model!r}.",
            param="model",
        )
    _one_of("quantization", speculative.quantization, (None, "int8", "int4"))
    if speculative.kv_cache_memory_bytes is not None:
        _whole("kv_cache_memory_bytes", speculative.kv_cache_memory_bytes, 1)
    if speculative.prompt_lookup_min > speculative.prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min ({speculative.prompt_lookup_min}) must not be above prompt_lookup_max "
            f"({speculative.prompt_lookup_max}).",
            param="prompt_lookup_min",
        )


def _runner_settings(
    num_blocks: int,
    max_model_len: int,
    scheduler: SchedulerConfig,
    threads: int,
    device: str,
    group_blocks: tuple[int, ...] = (),
    kv_cache_dtype: KVCacheDtype = "auto",
) -> RunnerSettings:
    max_sequences = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    drafts = 0 if scheduler.speculative is None else scheduler.speculative.num_speculative_tokens
    return RunnerSettings(
        num_blocks=num_blocks,
        max_batch_tokens=scheduler.max_num_batched_tokens,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        max_logit_rows=min(max_sequences + max(drafts, SPARE_LOGIT_ROWS), scheduler.max_num_batched_tokens),
        threads=threads,
        device=device,
        group_blocks=group_blocks,
        kv_cache_dtype=kv_cache_dtype,
    )


def _whole(name: str, value: Any, low: int, high: int = 2**63 - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        bound = f"of {low} or more" if high == 2**63 - 1 else f"from {low} to {high}"
        raise ConfigError(f"{name} must be a whole number {bound}, not {value!r}.", param=name)


def _seconds_or_size(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of 0 or more, not {value!r}.", param=name)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name} must be one of {shown}, not {value!r}.", param=name)
