"""From settings to sizes: blocks, context, memory, and clear errors for settings that cannot be met."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.backend import open_runner
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import simulated_architecture
from headrace.engine import memory
from headrace.engine.build import blocks_in_pool, build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.errors import ConfigError, HeadraceError, ModelNotFoundError, OutOfMemoryError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Tensor


@dataclass
class WeightlessCheckpoint:
    """A checkpoint of a given size on disk, for what is decided before weights are read."""

    path: Path
    architecture: Architecture = field(default_factory=lambda: simulated_architecture(windows=(None, 64)))

    def names(self) -> tuple[str, ...]:
        return ()

    def tensor(self, name: str) -> Tensor:
        raise AssertionError("nothing is loaded before memory is known to suffice")

    def fingerprint(self) -> str:
        return ""


def test_blocks_follow_from_bytes() -> None:
    """K and V in bfloat16 of 16 tokens, in the layers of both groups."""
    architecture = simulated_architecture(windows=(None, 64))
    per_group = 2 * 2 * 1 * 8 * 16
    assert memory.block_bytes(architecture) == 2 * per_group
    assert blocks_in_pool(architecture, CacheConfig(kv_cache_memory_bytes=10 * 2 * per_group + 1)) == 10
    with pytest.raises(ConfigError, match=r"1023.*1024 bytes"):
        blocks_in_pool(architecture, CacheConfig(kv_cache_memory_bytes=1023))


def test_int8_takes_little_more_than_half() -> None:
    """A byte a value, and two float32 scales a slot and head; K in whole fours of features."""
    architecture = simulated_architecture(windows=(None, 64))
    per_group = 16 * (8 + 8 + 2 * 4)
    assert memory.block_bytes(architecture, "int8") == 2 * per_group
    cache = CacheConfig(kv_cache_memory_bytes=10 * 2 * per_group, kv_cache_dtype="int8")
    assert blocks_in_pool(architecture, cache) == 10


def test_not_enough_memory_is_known_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel killed the process half-way through loading, without a word."""
    for name, size in (("a.safetensors", 200 * 2**20), ("b.safetensors", 100 * 2**20), ("other.bin", 2**30)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    checkpoint = WeightlessCheckpoint(tmp_path)
    settings = RunnerSettings(num_blocks=1024, max_batch_tokens=64, max_sequences=4, max_model_len=64)
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 * 2**20)
    memory.check_memory(checkpoint, ModelConfig(), settings)
    monkeypatch.setattr(memory, "available_bytes", lambda: 300 * 2**20)
    with pytest.raises(OutOfMemoryError, match=r"300 of weights.*300 MiB are available"):
        memory.check_memory(checkpoint, ModelConfig(), settings)
    memory.check_memory(checkpoint, ModelConfig(quantization="int4"), settings)


def test_available_memory_is_some() -> None:
    """The estimate is compared with what this machine really has."""
    assert 2**20 < memory.available_bytes() < 2**50


@pytest.mark.parametrize(
    ("folder", "limit", "usage"),
    [("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
)
def test_a_containers_limit_counts(tmp_path: Path, folder: str, limit: str, usage: str) -> None:
    """In a container the host's memory was promised. Later the model file's own cached pages, which give way,
    counted against it.
    """
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / limit).write_text("1000000\n")
    (tmp_path / folder / usage).write_text("700000\n")
    (tmp_path / folder / "memory.stat").write_text("anon 300000\ninactive_file 350000\nactive_file 50000\n")
    assert memory.available_bytes(tmp_path) == 700_000
    (tmp_path / folder / limit).write_text("max\n")
    assert memory.available_bytes(tmp_path) > 2**20


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ModelConfig, "quantization", "int3"),
        (ModelConfig, "backend", "gpu"),
        (ModelConfig, "device", "cuda"),
        (ModelConfig, "max_model_len", 1),
        (ModelConfig, "threads", -1),
        (ModelConfig, "threads", 1.5),
        (ModelConfig, "seed", "x"),
        (CacheConfig, "block_size", 32),
        (CacheConfig, "kv_cache_memory_bytes", 0),
        (CacheConfig, "kv_cache_memory_bytes", 2.0**30),
        (CacheConfig, "enable_prefix_caching", "yes"),
        (CacheConfig, "kv_cache_dtype", "int4"),
        (CacheConfig, "kv_cache_dtype", None),
        (CacheConfig, "swap_space", -1.0),
        (CacheConfig, "swap_space", float("nan")),
        (CacheConfig, "swap_space", 1e30),
        (CacheConfig, "kv_tier_path", ""),
        (CacheConfig, "kv_tier_path", "a\0b"),
        (CacheConfig, "kv_tier_path", Path("file")),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_batched_tokens", True),
        (SchedulerConfig, "max_waiting", 0),
        (SchedulerConfig, "max_queue_time_s", float("inf")),
    ],
)
def test_bad_settings_are_named(kind: type[Any], name: str, value: Any, tmp_path: Path) -> None:
    """A typo in a flag showed as a numpy error minutes later."""
    settings = {ModelConfig: ModelConfig(), CacheConfig: CacheConfig(), SchedulerConfig: SchedulerConfig()}
    settings[kind] = kind(**{name: value})
    with pytest.raises(ConfigError) as caught:
        build_engine(tmp_path, settings[ModelConfig], settings[CacheConfig], settings[SchedulerConfig])
    assert caught.value.param == name


def test_a_kept_tier_needs_prefix_caching(tmp_path: Path) -> None:
    """Without it nothing that is kept would ever be looked for."""
    cache = CacheConfig(kv_tier_path="blocks", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="leave prefix caching on"):
        build_engine(tmp_path, ModelConfig(), cache, SchedulerConfig())


def test_unknown_backend() -> None:
    """The name is wrong, and the error says which are right."""
    settings = RunnerSettings(num_blocks=1, max_batch_tokens=1, max_sequences=1, max_model_len=16)
    with pytest.raises(HeadraceError, match="'cpu' or 'torch'"):
        open_runner(WeightlessCheckpoint(Path()), "tpu", settings)


def test_no_model_there(tmp_path: Path) -> None:
    """Nothing at the path is one clear error, not a traceback."""
    with pytest.raises(ModelNotFoundError):
        build_engine(tmp_path / "none", ModelConfig(), CacheConfig(), SchedulerConfig())
