"""Where models lie and how fast they come from there; pages of memory; and, if asked, the network."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from headrace.lab.doctor.check import Check, gib, read
from headrace.paths import cache_dir

_MIN_DISK_BYTES = 2 * 2**30
_READ_BYTES = 256 * 2**20
_LEAST_BYTES = 16 * 2**20  # less says little about a disk
_CHUNK = 4 * 2**20
_SECONDS = 3.0  # for a disk, and for a download
_SLOW_READ = 0.5e9  # bytes a second; a SATA SSD's speed
_SLOW_DOWNLOAD = 10e6
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cache() -> Check:
    """The folder for models and packed weights: writable, and with room."""
    folder = cache_dir()
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions alone do not tell: read-only mounts, quotas
            pass
    except OSError as error:
        fix = "make it writable, or set HEADRACE_CACHE to a folder that is"
        cost = "models cannot be pulled, and weights are packed anew at every start"
        return Check("cache", "broken", f"{folder} cannot be written: {error.strerror}", fix, cost)
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {gib(free)} free"
    if free < _MIN_DISK_BYTES:
        fix = "free some space, or set HEADRACE_CACHE to a larger disk"
        return Check("cache", "slower", text, fix, "a model of a few billion parameters will not fit")
    return Check("cache", "ok", text)


def disk(folder: Path | None = None) -> Check:
    """How fast the cache folder's disk reads, past the page cache where the system lets go of it.

    Reads the largest file there, up to 256 MiB of it; without one of 16 MiB, a file written for the purpose.
    """
    folder = cache_dir() if folder is None else folder
    size, largest = max(_files(folder), default=(0, ""))
    if size >= _LEAST_BYTES:
        return _read_speed(Path(largest), Path(largest).name)
    with tempfile.NamedTemporaryFile(dir=_existing(folder)) as file:
        for _ in range(_LEAST_BYTES // _CHUNK):
            file.write(os.urandom(_CHUNK))
        file.flush()
        os.fsync(file.fileno())
        return _read_speed(Path(file.name), f"a file written into {_existing(folder)}")


def _files(folder: Path) -> Iterator[tuple[int, str]]:
    """Sizes and paths of the files below a folder; what cannot be looked into is left out.

    A cache may have as many as a disk: a Path for each would take seconds.
    """
    left = [str(folder)]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False).st_size, entry.path


def _read_speed(path: Path, name: str) -> Check:
    with path.open("rb", buffering=0) as file:
        size = min(os.fstat(file.fileno()).st_size, _READ_BYTES)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        kept = _cached_share(file.fileno(), size)
        done, start = 0, time.perf_counter()
        buffer = bytearray(_CHUNK)
        while done < size and time.perf_counter() - start < _SECONDS:
            count = file.readinto(buffer)
            if not count:
                break
            done += count
        rate = done / max(time.perf_counter() - start, 1e-9)
    text = f"{rate / 1e9:.2f} GB/s, reading {done / 2**20:.0f} MiB of {name}"
    if kept is None or kept > 0.1:
        return Check("disk", "ok", f"{text} (from the page cache, in part: not the disk's speed)")
    if rate < _SLOW_READ:
        fix = "put HEADRACE_CACHE on a local NVMe disk, or keep the server warm"
        return Check("disk", "slower", text, fix, f"a cold start waits {2**30 / rate:.0f} s for each GiB")
    return Check("disk", "ok", text)


def _cached_share(file: int, size: int) -> float | None:
    """Of some places of a file, how many the page cache still has; None where it cannot be asked."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return None
    places = 16
    cached = 0
    for place in range(places):
        try:
            cached += os.preadv(file, [bytearray(1)], size * place // places, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            continue
        except OSError:  # not with every file system
            return None
    return cached / places


def huge_pages(setting: Path = _HUGE_PAGES) -> Check:
    """Whether large buffers (KV, scratch) may lie in pages of 2 MiB."""
    text = read(setting).strip()
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return Check("huge pages", "ok", "not known here")
    if chosen == "never":
        cost = "KV and scratch lie in pages of 4 KiB: more page walks, a few percent of long contexts"
        return Check("huge pages", "slower", chosen, f"echo madvise > {setting}", cost)
    return Check("huge pages", "ok", chosen)


def network(url: str) -> Check:
    """How fast ``url`` downloads: three seconds of it, or 256 MiB."""
    if not url.lower().startswith(("http://", "https://")):
        fix = "give an address such as https://host/a-large-file"
        return Check("network", "broken", f"{url} is no http or https address", fix)
    try:
        start = time.perf_counter()
        with urllib.request.urlopen(url, timeout=10) as answer:
            first_s = time.perf_counter() - start
            done, start = 0, time.perf_counter()
            while done < _READ_BYTES and time.perf_counter() - start < _SECONDS:
                part = answer.read(65536)
                if not part:
                    break
                done += len(part)
        rate = done / max(time.perf_counter() - start, 1e-9)
    except (OSError, ValueError, urllib.error.URLError) as error:
        refused = isinstance(error, urllib.error.HTTPError)
        reason = error if refused else getattr(error, "reason", error)
        fix = "check the address, the proxy (https_proxy) and the firewall"
        return Check("network", "broken", f"{url} cannot be read: {reason}", fix, "models cannot be pulled")
    text = f"{rate / 1e6:.1f} MB/s after {first_s * 1000:.0f} ms, {done / 2**20:.1f} MiB of {url}"
    if done < 2**20:
        return Check("network", "ok", f"{text} (too little to tell a speed)")
    if rate < _SLOW_DOWNLOAD:
        cost = f"pulling a GiB takes {2**30 / rate / 60:.0f} minutes"
        return Check("network", "slower", text, "use a mirror nearby, or copy the cache folder", cost)
    return Check("network", "ok", text)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
