"""Memory and files in pages of 2 MiB where that pays: processors look up far fewer of them.

A large page is taken whole at its first touch, so what is used in part only stays in small ones. All of this
is a wish: where the system has no large pages, or has none left, pages are small.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LARGE_PAGE_BYTES = 2 << 20


def zeros(size: int, *, large: bool) -> NDArray[np.uint8]:
    """``size`` zero bytes, aligned to a page. The system commits pages only when they are touched."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large:
        _wish(memory)
    return np.frombuffer(memory, np.uint8)


def map_file(path: Path) -> NDArray[np.uint8]:
    """A file's bytes, read-only. Raises OSError, or ValueError for an empty one.

    What is not in the page cache is read into large pages; what :class:`Writer` wrote is there in them.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _wish(mapped)
    return np.frombuffer(mapped, np.uint8)


class Writer:
    """Writes to an unbuffered file by the large page: file systems keep what comes in one call together."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._held = bytearray()
        self._written = 0

    def tell(self) -> int:
        """Bytes so far."""
        return self._written + len(self._held)

    def write(self, data: Any) -> None:
        """Append a contiguous buffer of bytes. Raises OSError."""
        view, at = memoryview(data).cast("B"), 0
        if self._held:
            at = min(LARGE_PAGE_BYTES - len(self._held), len(view))
            self._held += view[:at]
            if len(self._held) == LARGE_PAGE_BYTES:
                self.finish()
        while len(view) - at >= LARGE_PAGE_BYTES:
            self._put(view[at : at + LARGE_PAGE_BYTES])
            at += LARGE_PAGE_BYTES
        self._held += view[at:]

    def finish(self) -> None:
        """Write what is left. Raises OSError."""
        with memoryview(self._held) as held:
            self._put(held)
        self._held.clear()

    def _put(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            at += self._file.write(data[at:])
        self._written += at


def _wish(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
