"""JournalFile: records appended to a file, each whole or not there at all, whatever kills the process.

The file is a magic number and then records: four bytes of length, four of the CRC-32 of what follows
(little-endian both), and so many bytes. Reading ends at the first record that is not whole: what a process
was writing when it died is as if it had never been. No length is believed beyond the bytes that are there.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.errors import ConfigError

MAGIC = b"headrace journal 1\n"
_HEAD = struct.Struct("<II")
_NAME = "requests.journal"


class FolderLock:
    """A folder that one process at a time may use. When that process ends, however it ends, it is free."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be. Raises ConfigError if it cannot be had."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"checkpoint_path {str(folder)!r} cannot be used: {error.strerror or error}.",
                param="checkpoint_path",
            ) from None
        if not _lock(self._fd):
            os.close(self._fd)
            raise ConfigError(
                f"checkpoint_path {str(folder)!r} is in use by another process: give each its own.",
                param="checkpoint_path",
            )

    def release(self) -> None:
        """Let others have the folder. Releasing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: the second process's rename fails instead
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class JournalFile:
    """The journal of one folder. Not thread-safe: one thread writes."""

    def __init__(self, folder: Path) -> None:
        """Nothing is opened yet: :meth:`rewrite` starts a file that can be appended to."""
        self.path = folder / _NAME
        self.size_bytes = 0
        self._fd = -1

    def append(self, payloads: Iterable[bytes]) -> None:
        """Add records, all or none of them. Raises OSError; then the file is what it was before."""
        data = b"".join(map(_framed, payloads))
        try:
            _write_all(self._fd, data)
        except OSError:
            with contextlib.suppress(OSError):  # a torn end is ignored by readers as well
                os.ftruncate(self._fd, self.size_bytes)
                os.lseek(self._fd, self.size_bytes, os.SEEK_SET)
            raise
        self.size_bytes += len(data)

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Put these records in the place of all others. Raises OSError; then the old file is still there."""
        fresh = self.path.with_suffix(".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        size = len(MAGIC)
        try:
            _write_all(fd, MAGIC)
            for payload in payloads:
                framed = _framed(payload)
                _write_all(fd, framed)
                size += len(framed)
            os.fsync(fd)
            fresh.replace(self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        self.close()
        self._fd, self.size_bytes = fd, size
        _sync_folder(self.path.parent)

    def sync(self) -> None:
        """Have the disk hold what was appended. Raises OSError."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_records(folder: Path) -> Iterator[bytes]:
    """The whole records of a folder's journal, in order; nothing if there is none. Raises ConfigError.

    A file that is no journal of ours is refused, lest it be written over.
    """
    path = folder / _NAME
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - len(MAGIC)
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                if MAGIC.startswith(magic):  # torn before its first record
                    return
                raise ConfigError(
                    f"{path} is no journal of this version of headrace: move it away, or use another folder.",
                    param="checkpoint_path",
                )
            yield from _records(file, left)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}.", param="checkpoint_path"
        ) from None


def _records(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left >= _HEAD.size:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        length, crc = _HEAD.unpack(head)
        left -= _HEAD.size
        if length > left:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != crc:
            return
        left -= length
        yield payload


def _framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    """Have the disk know the new name, where a system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
