"""How much memory a model and its KV pool will take, and how much there is: asked before loading."""

from __future__ import annotations

from pathlib import Path

import psutil

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.runner import RunnerSettings
from headrace.engine.config import ModelConfig
from headrace.errors import OutOfMemoryError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint

KV_BYTES_PER_VALUE = 2  # bfloat16
_NARROWED = {"int8": 9 / 16, "int4": 5 / 16}  # of 16-bit weights: codes and one scale for each group
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_FIXED_BYTES = 64 * 2**20  # interpreter, tables, program


def group_block_bytes(architecture: Architecture) -> list[int]:
    """Bytes of one block in each KV group: K and V of 16 tokens in its layers."""
    return [
        2 * KV_BYTES_PER_VALUE * group.kv_heads * group.head_dim * BLOCK_SIZE * len(group.layers)
        for group in architecture.kv_groups
    ]


def block_bytes(architecture: Architecture) -> int:
    """Bytes of one block in every KV group."""
    return sum(group_block_bytes(architecture))


def check_memory(checkpoint: Checkpoint, model: ModelConfig, settings: RunnerSettings) -> None:
    """Raise OutOfMemoryError if weights, KV pool and scratch will not fit into what is available."""
    weights = weight_bytes(checkpoint.path) * _NARROWED.get(model.quantization or "", 1.0)
    pool = sum(
        settings.blocks_of(group) * size
        for group, size in enumerate(group_block_bytes(checkpoint.architecture))
    )
    needed = int(weights) + pool + scratch_bytes(checkpoint.architecture, settings) + _FIXED_BYTES
    available = available_bytes()
    if needed > available:
        raise OutOfMemoryError(
            f"The model needs about {_mib(needed)} MiB ({_mib(int(weights))} of weights, {_mib(pool)} of KV "
            f"cache), but only {_mib(available)} MiB are available. Lower kv_cache_memory_bytes "
            "(--kv-cache-memory), choose a stronger quantization or a smaller model."
        )


def weight_bytes(path: Path) -> int:
    """Size of the weight files at ``path``: one file, or a folder of them."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    return path.stat().st_size


def scratch_bytes(architecture: Architecture, settings: RunnerSettings) -> int:
    """Float32 rows of a step's intermediate values, and logits of its sampled rows: an upper estimate."""
    widths = [
        (spec.attention.heads + spec.attention.kv_heads) * 2 * spec.attention.head_dim
        + 3 * spec.feed_forward.width
        for spec in architecture.layers
    ]
    per_token = 4 * architecture.hidden_size + max(widths, default=0)
    return 4 * (settings.max_batch_tokens * per_token + settings.max_logit_rows * architecture.vocab_size)


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be taken without swapping: the machine's, or the container's if that is less.

    ``cgroup`` is where the control group's files are: version 2, or a version 1 tree with ``memory/`` in it.
    """
    available = int(psutil.virtual_memory().available)
    version_1 = cgroup / "memory"
    for limit, usage, stat in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"),
        (version_1 / "memory.limit_in_bytes", version_1 / "memory.usage_in_bytes", version_1 / "memory.stat"),
    ):
        try:
            free = int(limit.read_text()) - int(usage.read_text()) + _file_cache_bytes(stat)
        except (OSError, ValueError):  # no such controller, or no limit ("max")
            continue
        available = min(available, max(0, free))
    return available


def _file_cache_bytes(stat: Path) -> int:
    """Cached file pages count as used in a control group, but give way when memory is asked for."""
    values = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))


def _mib(size: int) -> int:
    return -(-size // 2**20)
