"""The second tier in a file: bounded, checked on every way out of it, and good for the next process.

Layout: a page that says whose blocks these are; a record for each slot; the slots. The file is read by these
offsets only, which follow from this process's own settings: nothing in it says where anything is. A process
that dies in the middle of a write leaves a slot whose record or checksums do not fit, and such a slot is
empty. The file grows as it is filled.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.kv_tier_store import Parts, TierBlock
from headrace.engine.prefix_cache import KEY_BYTES, block_key
from headrace.errors import ConfigError

_log = logging.getLogger(__name__)

_PAGE = 4096
_MAGIC = b"headrace KV tier\n"
_VERSION = 1
_FIXED = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{4 * BLOCK_SIZE}sQQ")  # …, age, groups as bits
MAX_GROUPS = 64  # bits of a record
_RECORDS_AT_ONCE = 4096


class TierFile:
    """Slots in an open file; implements :class:`~headrace.engine.kv_tier_store.TierStore`.

    ``file`` is open for reading and writing, unbuffered, and nobody else writes to it. Without ``identity``
    what is in it is of no use to others, and whatever it holds is ignored; with it the next process that
    asks for the same ``identity`` (whose K and V they are, and in what format), ``block_bytes`` and
    ``size_bytes`` finds its blocks again. Raises OSError when the file cannot be written to at all.
    """

    def __init__(
        self, file: IO[bytes], size_bytes: int, block_bytes: tuple[int, ...], *, identity: str | None = None
    ) -> None:
        assert len(block_bytes) <= MAX_GROUPS
        self._file = file
        self._fd = file.fileno()
        self.is_kept = identity is not None
        self.slot_bytes = sum(block_bytes)
        self._block_bytes = block_bytes
        self._starts = [sum(block_bytes[:group]) for group in range(len(block_bytes))]
        self._record_bytes = _FIXED.size + 4 * len(block_bytes) + 4
        self.num_slots = slots_within(size_bytes, block_bytes)
        self._slots_at = -(-(_PAGE + self.num_slots * self._record_bytes) // _PAGE) * _PAGE
        self._age = 0
        header = self._header(identity or "")
        found = os.pread(self._fd, _PAGE, 0)
        self._is_old = self.is_kept and found == header
        if not self._is_old:
            if self.is_kept and any(found):
                _log.warning(
                    "The KV tier in %s is of another model, version or size: it starts empty.", file.name
                )
            os.ftruncate(self._fd, 0)
            self._write_at(0, header)

    def blocks(self) -> list[TierBlock]:
        """What an earlier process has left, as far as its records are sound, oldest first."""
        if not self._is_old:
            return []
        found: dict[bytes, tuple[int, TierBlock]] = {}
        try:
            for slot, record in enumerate(self._records()):
                parsed = self._parse(slot, record)
                if parsed is None:
                    continue
                age, block = parsed
                if block.key not in found or found[block.key][0] < age:
                    found[block.key] = parsed
                self._age = max(self._age, age)
        except OSError as error:
            _log.warning("The KV tier in %s can be read in part only: %s", self._file.name, error)
        return [block for _, block in sorted(found.values(), key=lambda each: each[0])]

    def write(self, block: TierBlock, parts: Parts) -> None:
        """See :class:`TierStore`."""
        record_at = _PAGE + block.slot * self._record_bytes
        # Whoever dies after this line leaves an empty slot, not an old record before new bytes.
        self._write_at(record_at, bytes(self._record_bytes))
        checksums = {}
        for group, part in parts.items():
            checksums[group] = zlib.crc32(part.data)
            self._write_at(self._slots_at + block.slot * self.slot_bytes + self._starts[group], part.data)
        self._age += 1
        fixed = _FIXED.pack(
            block.key, block.parent, block.root, block.tokens, self._age, sum(1 << group for group in parts)
        )
        sums = [checksums.get(group, 0) for group in range(len(self._block_bytes))]
        record = fixed + struct.pack(f"<{len(sums)}I", *sums)
        self._write_at(record_at, record + struct.pack("<I", zlib.crc32(record)))
        block.checksums = checksums

    def read(self, block: TierBlock, groups: frozenset[int]) -> Parts | None:
        """See :class:`TierStore`."""
        parts: Parts = {}
        for group in groups:
            part = np.empty(self._block_bytes[group], np.uint8)
            start = self._slots_at + block.slot * self.slot_bytes + self._starts[group]
            if (
                _read_into(self._fd, part, start) < len(part)
                or zlib.crc32(part.data) != block.checksums[group]
            ):
                return None
            parts[group] = part
        return parts

    def close(self) -> None:
        """See :class:`TierStore`."""
        self._file.close()

    def _header(self, identity: str) -> bytes:
        text = json.dumps(
            {
                "version": _VERSION,
                "identity": identity,
                "block_size": BLOCK_SIZE,
                "block_bytes": self._block_bytes,
                "slots": self.num_slots,
            }
        ).encode()
        header = _MAGIC + struct.pack("<I", zlib.crc32(text)) + text
        assert len(header) <= _PAGE
        return header.ljust(_PAGE, b"\0")

    def _records(self) -> Iterator[bytes]:
        """Those of all slots, as far as the file goes."""
        for first in range(0, self.num_slots, _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, self.num_slots - first)
            piece = np.empty(count * self._record_bytes, np.uint8)
            there = _read_into(self._fd, piece, _PAGE + first * self._record_bytes)
            for at in range(0, there // self._record_bytes * self._record_bytes, self._record_bytes):
                yield piece[at : at + self._record_bytes].tobytes()
            if there < len(piece):
                return

    def _parse(self, slot: int, record: bytes) -> tuple[int, TierBlock] | None:
        """Age and block of a record; None for one that is empty, torn or wrong."""
        if (
            record.startswith(bytes(KEY_BYTES))
            or zlib.crc32(record[:-4]) != struct.unpack("<I", record[-4:])[0]
        ):
            return None
        key, parent, root, tokens, age, bits = _FIXED.unpack_from(record)
        num_groups = len(self._block_bytes)
        if not 0 < bits < 1 << num_groups or key != block_key(parent, tokens):
            return None
        groups = frozenset(group for group in range(num_groups) if bits >> group & 1)
        sums = struct.unpack_from(f"<{num_groups}I", record, _FIXED.size)
        block = TierBlock(key, parent, root, tokens, groups, slot)
        block.checksums = {group: sums[group] for group in groups}
        return age, block

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written


def slots_within(size_bytes: int, block_bytes: tuple[int, ...]) -> int:
    """Slots of a file that may have ``size_bytes``; 0 when there is room for none."""
    each = sum(block_bytes) + _FIXED.size + 4 * len(block_bytes) + 4
    return max(0, size_bytes - 2 * _PAGE) // each


def open_tier_path(path: Path) -> IO[bytes]:
    """Open, or make, the file for a :class:`TierFile` that is kept: readable by its owner only.

    It is locked until it is closed. Raises ConfigError when it cannot be opened, holds something else or is
    in use.
    """
    import fcntl  # where there is none, there is no pread either

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"kv_tier_path: {path} cannot be opened for writing: {error.strerror or error}.",
            param="kv_tier_path",
        ) from None
    is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    begins = file.read(len(_MAGIC)) if is_file else b""
    # A file that a crash of the machine left with its first page unwritten has zeros there.
    if not is_file or (any(begins) and begins != _MAGIC):
        file.close()
        raise ConfigError(
            f"kv_tier_path: {path} is no KV tier, and is left as it is; give the path of another file, or "
            "of a folder.",
            param="kv_tier_path",
        )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"kv_tier_path: {path} is in use by another engine; give each its own.", param="kv_tier_path"
        ) from None
    return file


def _read_into(fd: int, array: NDArray[np.uint8], offset: int) -> int:
    """Fill ``array``; how many bytes there were, fewer where the file ends."""
    view, done = array.data, 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
