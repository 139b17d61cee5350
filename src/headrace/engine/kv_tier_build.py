"""From settings to a second tier: where it lies, and how large it may be."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headrace.backend.kv_format import KV_LAYOUT
from headrace.backend.runner import Runner
from headrace.engine.config import CacheConfig
from headrace.engine.kv_tier import KVTier
from headrace.engine.kv_tier_file import MAX_GROUPS, TierFile, open_tier_path, slots_within
from headrace.engine.kv_tier_store import Background, MemoryStore
from headrace.engine.memory import available_bytes
from headrace.errors import ConfigError, OutOfMemoryError
from headrace.paths import cache_dir

DEFAULT_SWAP_SPACE = 4.0  # GiB of a kept tier whose size nobody says


def open_tier(
    cache: CacheConfig, runner: Runner, device: str, *, clock: Callable[[], float] = time.monotonic
) -> KVTier | None:
    """The second tier that ``cache`` asks for, if any, for the blocks of a runner on ``device``.

    A path: a file that is kept. Else host memory, if the blocks are elsewhere; if they are in host memory
    themselves, a file without a name, which is gone with the process. Raises ConfigError for a path that
    cannot be used and a size that holds not even one block, OutOfMemoryError when memory does not suffice.
    """
    if runner.architecture.encoder is not None:
        if cache.kv_tier_path is not None:
            raise ConfigError(
                "Encoders keep no keys and values from one step to the next: leave kv_tier_path out.",
                param="kv_tier_path",
            )
        return None
    swap_space = cache.swap_space
    if cache.kv_tier_path is not None:
        swap_space = swap_space or DEFAULT_SWAP_SPACE
    if not swap_space:
        return None
    if len(runner.block_bytes) > MAX_GROUPS:
        raise ConfigError(
            f"This model keeps {len(runner.block_bytes)} kinds of KV blocks, and a second tier can have "
            f"{MAX_GROUPS}: leave swap_space and kv_tier_path out.",
            param="swap_space",
        )
    size_bytes = int(swap_space * 2**30)
    if slots_within(size_bytes, runner.block_bytes) < 1:
        raise ConfigError(
            f"swap_space (--swap-space) is {swap_space:g} GiB, but one block of this model takes "
            f"{sum(runner.block_bytes)} bytes: give at least a thousand times as much, or 0.",
            param="swap_space",
        )
    if cache.kv_tier_path is not None:
        file = open_tier_path(_file_at(cache.kv_tier_path, runner.capabilities.fingerprint))
        identity = f"{runner.capabilities.fingerprint} {runner.capabilities.kv_dtype} {KV_LAYOUT}"
        try:
            store = TierFile(file, size_bytes, runner.block_bytes, identity=identity)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"kv_tier_path: {file.name} cannot be used: {error.strerror or error}.",
                param="kv_tier_path",
            ) from None
        return KVTier(runner, store, Background(), clock=clock)
    if device != "cpu":
        return KVTier(runner, _in_memory(size_bytes, runner.block_bytes), clock=clock)
    folder = cache_dir() / "kv-tier"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unnamed = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, the store closes it
        return KVTier(runner, TierFile(unnamed, size_bytes, runner.block_bytes), Background(), clock=clock)
    except OSError as error:
        raise ConfigError(
            f"swap_space (--swap-space) needs a file in {folder}: {error.strerror or error}. Say with "
            "HEADRACE_CACHE where there is room, or give 0.",
            param="swap_space",
        ) from None


def _in_memory(size_bytes: int, block_bytes: tuple[int, ...]) -> MemoryStore:
    available = available_bytes()
    if size_bytes > available:
        raise OutOfMemoryError(
            f"swap_space (--swap-space) is {size_bytes / 2**30:g} GiB of host memory, of which "
            f"{available / 2**30:.1f} GiB are available: give less.",
            param="swap_space",
        )
    return MemoryStore(size_bytes // sum(block_bytes), block_bytes)


def _file_at(path: str, fingerprint: str) -> Path:
    """The file itself, or the one of this model and format in a folder."""
    found = Path(path).expanduser()
    if not (found.is_dir() or path.endswith(("/", os.sep))):
        return found
    return found / f"kv-{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}.tier"
