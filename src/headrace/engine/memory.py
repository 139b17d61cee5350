"""How much memory a model and its KV pool will take, and how much there is: asked before loading.

And giving back what loading has freed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backend.kv_format import KVCacheDtype, kv_block_bytes
from headrace.backend.runner import RunnerSettings
from headrace.engine.config import ModelConfig
from headrace.errors import OutOfMemoryError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from headrace.engine.draft_build import DraftPlan

_NARROWED = {"int8": 9 / 16, "int4": 5 / 16}  # of 16-bit weights: codes and one scale for each group
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_FIXED_BYTES = 64 * 2**20  # interpreter, tables, program


def group_block_bytes(architecture: Architecture, kv_cache_dtype: KVCacheDtype = "auto") -> list[int]:
    """Bytes of one block in each KV group: K and V of 16 tokens in its layers."""
    return [kv_block_bytes(group, kv_cache_dtype) for group in architecture.kv_groups]


def block_bytes(architecture: Architecture, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Bytes of one block in every KV group."""
    return sum(group_block_bytes(architecture, kv_cache_dtype))


def check_memory(
    checkpoint: Checkpoint, model: ModelConfig, settings: RunnerSettings, draft: DraftPlan | None = None
) -> None:
    """Raise OutOfMemoryError if weights, KV pool and scratch will not fit into what is available.

    Those of a draft model count, too.
    """
    weights, pool, needed = _needs(checkpoint, model.quantization, settings)
    beside = 0 if draft is None else _needs(draft.checkpoint, draft.quantization, draft.settings)[2]
    needed += beside
    available = available_bytes()
    if needed > available:
        drafts = f", {_mib(beside)} for the draft model" if beside else ""
        raise OutOfMemoryError(
            f"The model needs about {_mib(needed)} MiB ({_mib(weights)} of weights, {_mib(pool)} of KV "
            f"cache{drafts}), but only {_mib(available)} MiB are available. Lower kv_cache_memory_bytes "
            "(--kv-cache-memory), choose a stronger quantization or a smaller model."
        )


def _needs(
    checkpoint: Checkpoint, quantization: str | None, settings: RunnerSettings
) -> tuple[int, int, int]:
    """Bytes of weights, of the KV pool, and of both with all else."""
    weights = weight_bytes(checkpoint.path)
    if quantization is not None:
        from headrace.model.weights.safetensors import SafetensorsCheckpoint

        stays = isinstance(checkpoint, SafetensorsCheckpoint) and checkpoint.quantised
        weights = weights if stays else int(weights * _NARROWED[quantization])
    sizes = group_block_bytes(checkpoint.architecture, settings.kv_cache_dtype)
    pool = sum(settings.blocks_of(group) * size for group, size in enumerate(sizes))
    return weights, pool, weights + pool + scratch_bytes(checkpoint.architecture, settings) + _FIXED_BYTES


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
    available = _available_to_all()
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


def trim_memory() -> None:
    """Give back what has been freed: glibc keeps it, and a process is small for as long as it lives."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _available_to_all() -> int:
    """What the machine has. Linux says it in a file; a start does not wait for psutil's import there."""
    try:
        values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(values["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        import psutil

        return int(psutil.virtual_memory().available)


def _file_cache_bytes(stat: Path) -> int:
    """Cached file pages count as used in a control group, but give way when memory is asked for."""
    values = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))


def _mib(size: int) -> int:
    return -(-size // 2**20)
