"""Large pages: files that are written and mapped by them, and memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backend.cpu.pages import LARGE_PAGE_BYTES, Writer, map_file, zeros


class Disk(io.RawIOBase):
    """Keeps where each call wrote, and takes at most ``most`` bytes of one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls: list[tuple[int, int]] = []
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.most]
        self.calls.append((len(self.content), len(data)))
        self.content += taken
        return len(taken)


@pytest.mark.parametrize("most", [1 << 30, 700_001])
def test_files_are_written_by_the_large_page(most: int) -> None:
    """File systems keep in one large page what comes in one call; some calls write less than was asked."""
    sizes = [1, 0, 5_000_000, LARGE_PAGE_BYTES, 63, 2 * LARGE_PAGE_BYTES - 64, 300, 4_194_304 + 5]
    rng = np.random.default_rng(0)
    disk = Disk(most)
    writer = Writer(disk)
    pieces = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    for piece in pieces:
        writer.write(piece.data)
    assert writer.tell() == sum(sizes)
    writer.finish()
    assert writer.tell() == len(disk.content) == sum(sizes)
    assert bytes(disk.content) == b"".join(piece.tobytes() for piece in pieces)
    if most > LARGE_PAGE_BYTES:
        *whole, (start, rest) = disk.calls
        assert whole == [(n * LARGE_PAGE_BYTES, LARGE_PAGE_BYTES) for n in range(len(whole))]
        assert start + rest == sum(sizes)


def test_a_mapped_file_is_what_is_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5)
    mapped = map_file(path)
    assert mapped.tobytes() == path.read_bytes()
    assert not mapped.flags.writeable
    path.write_bytes(b"")
    with pytest.raises(ValueError):
        map_file(path)
    with pytest.raises(OSError):
        map_file(tmp_path / "none")


@pytest.mark.parametrize("size", [0, 1, 4096, 5 << 20])
@pytest.mark.parametrize("large", [False, True])
def test_memory_is_zero_aligned_and_writable(size: int, large: bool) -> None:
    memory = zeros(size, large=large)
    assert len(memory) >= size
    assert memory.ctypes.data % 64 == 0
    assert not memory.any()
    memory[:size] = 1
    assert memory[:size].all()
