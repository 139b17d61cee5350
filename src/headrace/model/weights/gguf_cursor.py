"""Reading a mapped file front to back, believing none of its lengths."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn

from headrace.errors import ModelFormatError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_NAME_BYTES = 1 << 16


class Cursor:
    """The next unread byte of a mapped file. Methods raise ModelFormatError rather than read past it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        """Raise the error that says what is wrong with this file."""
        raise format_error(self.path, what)

    def take(self, count: int, what: str) -> int:
        """Claim the next ``count`` bytes and return where they start."""
        start = self.at
        if count > self.size - start:
            self.fail(
                f"it ends inside {what} ({count} bytes needed at byte {start}, the file has {self.size}): "
                "it is truncated or corrupt"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        """The next four bytes as an unsigned number."""
        start = self.take(4, what)
        return int(_U32.unpack_from(self.data, start)[0])

    def u64(self, what: str) -> int:
        """The next eight bytes as an unsigned number."""
        start = self.take(8, what)
        return int(_U64.unpack_from(self.data, start)[0])

    def name(self, what: str) -> str:
        """A short string: its length, then UTF-8."""
        length = self.u64(f"the length of {what}")
        if not 0 < length < _MAX_NAME_BYTES:
            self.fail(f"{what} is {length} bytes long")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def skip_strings(self, count: int, what: str) -> int:
        """Step over ``count`` strings without decoding them; return where they start."""
        self.take(8 * count, what)  # each has at least its length
        start = at = self.at - 8 * count
        unpack, data = _U64.unpack_from, self.data
        try:
            for _ in range(count):
                at += unpack(data, at)[0] + 8
        except (struct.error, OverflowError, IndexError):  # a length led past the end of the file
            at = self.size + 1
        if at > self.size:
            self.fail(f"{what} run past its end: it is truncated or corrupt")
        self.at = at
        return start


def decode_strings(data: bytes, count: int) -> list[str]:
    """The ``count`` length-prefixed strings in ``data``, as :meth:`Cursor.skip_strings` found them."""
    strings: list[str] = []
    append, unpack, at = strings.append, _U64.unpack_from, 0
    for _ in range(count):
        start = at + 8
        at = start + unpack(data, at)[0]
        append(data[start:at].decode())
    return strings


def format_error(path: Path, what: str) -> ModelFormatError:
    """The error for a GGUF file that is damaged, or that headrace cannot run."""
    return ModelFormatError(f"Cannot use the GGUF file {path}: {what}.")
