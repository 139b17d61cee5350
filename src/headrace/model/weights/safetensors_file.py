"""One safetensors file: its header, checked against the file before a single offset is used.

Format: 8 bytes little-endian header length, a JSON object of that length, then the tensors' bytes without
holes (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelFormatError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have."""
_PARTS: dict[str, np.dtype[Any]] = {  # of quantised weights; float8 as its bits
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; ``start`` and ``end`` are byte offsets from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A memory-mapped file. ``entries`` are in the order of their bytes.

    Raises ModelFormatError when the file does not keep to the format, OSError when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise self._wrong(f"{size} bytes are too few for a header length")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise self._wrong(f"the header claims {length} bytes, the file has {size - 8} after the length")
        self.entries = self._read_header(self._map[8 : 8 + length], 8 + length, size)

    def read(self, name: str) -> NDArray[Any]:
        """The named tensor as a read-only view of the mapping, in its own dtype; float8 e4m3 as its bits.

        Raises KeyError for a dtype that is neither in READABLE nor float8 e4m3 nor an int of 8, 32 or 64
        bits.
        """
        entry = self.entries[name]
        dtype = READABLE.get(entry.dtype) or _PARTS[entry.dtype]
        flat = np.frombuffer(self._map, dtype, count=math.prod(entry.shape), offset=entry.start)
        return flat.reshape(entry.shape)

    def _read_header(self, raw: bytes, data_start: int, size: int) -> dict[str, Entry]:
        try:
            header = json.loads(raw, object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._wrong("the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, value, data_start) for name, value in header.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
        position = data_start
        for name, entry in entries.items():
            if entry.start != position:
                raise self._wrong(
                    f"tensor {name!r} starts at byte {entry.start - data_start} of the data, where its "
                    f"predecessor ends at {position - data_start}"
                )
            position = entry.end
        if position != size:
            raise self._wrong(
                f"the tensors need {position - data_start} bytes of data, the file has {size - data_start}"
            )
        return entries

    def _entry(self, name: str, value: object, data_start: int) -> Entry:
        if not isinstance(value, dict):
            raise self._wrong(f"tensor {name!r} is not described by a JSON object")
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
            raise self._wrong(f"tensor {name!r} has an unknown dtype")
        if not _are_counts(shape) or len(shape) > 64:
            raise self._wrong(f"tensor {name!r}: 'shape' must be a list of non-negative integers")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise self._wrong(f"tensor {name!r}: 'data_offsets' must be two non-negative integers")
        begin, end = offsets
        bits = math.prod(shape) * _ITEM_BITS[dtype]
        if bits % 8 or end - begin != bits // 8:
            raise self._wrong(f"tensor {name!r}: its offsets do not match its shape and dtype {dtype}")
        return Entry(dtype, tuple(shape), data_start + begin, data_start + end)

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise self._wrong("the header names something twice")
        return found

    def _wrong(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path.name} is not a valid safetensors file: {problem}.")


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of integers that a 64-bit file could hold."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
