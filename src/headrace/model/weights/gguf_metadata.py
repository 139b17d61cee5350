"""GGUF metadata: typed keys and values, measured when the file is opened and decoded when asked for."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.model.weights.gguf_cursor import Cursor, decode_strings, format_error

_SCALARS = {
    **{0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h")},
    **{4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?")},
    **{10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")},
}
_ELEMENTS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Far above any real file, and low enough that a lying one costs no noticeable time or memory.
MAX_KEYS = 1 << 16
_MAX_STRINGS = 1 << 24  # elements of all string arrays together


@dataclass(frozen=True, slots=True)
class _Span:
    """A string, or an array, that has been measured but not decoded."""

    kind: int  # of the elements
    start: int
    stop: int
    count: int | None  # None: a lone string


class Metadata(Mapping[str, Any]):
    """Key-value pairs: Python scalars, ``str``, ``list[str]`` and numpy arrays.

    Strings and arrays are decoded when first asked for: a vocabulary nobody reads costs nothing. Asking
    raises ModelFormatError for a string that is not UTF-8.
    """

    def __init__(self, path: Path, data: mmap.mmap, values: dict[str, Any]) -> None:
        self._path = path
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Span):
            value = self._values[key] = self._decode(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def array_length(self, key: str) -> int | None:
        """How many elements an array has, without decoding it; None if there is no array of that name."""
        value = self._values.get(key)
        if isinstance(value, _Span):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else None

    def _decode(self, key: str, span: _Span) -> Any:
        data = self._data[span.start : span.stop]
        if span.kind != _STRING:
            array = np.frombuffer(data, dtype=_ELEMENTS[span.kind])
            return array != 0 if span.kind == _BOOL else array
        try:
            return data.decode() if span.count is None else decode_strings(data, span.count)
        except UnicodeDecodeError:
            raise format_error(self._path, f"metadata key {key} holds a string that is not UTF-8") from None


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Measure ``count`` key-value pairs. Raises ModelFormatError where they do not fit the file."""
    values: dict[str, Any] = {}
    strings_left = _MAX_STRINGS
    for number in range(count):
        key = cursor.name(f"the name of metadata key {number}")
        if key in values:
            cursor.fail(f"metadata key {key} appears twice")
        kind = cursor.u32(f"the type of {key}")
        if kind == _ARRAY:
            values[key] = span = _read_array(cursor, key, strings_left)
            strings_left -= (span.count or 0) if span.kind == _STRING else 0
        elif kind == _STRING:
            length = cursor.u64(f"the length of {key}")
            start = cursor.take(length, key)
            values[key] = _Span(_STRING, start, start + length, None)
        elif kind in _SCALARS:
            start = cursor.take(_SCALARS[kind].size, key)
            values[key] = _SCALARS[kind].unpack_from(cursor.data, start)[0]
        else:
            cursor.fail(f"metadata key {key} has unknown type {kind}")
    return Metadata(cursor.path, cursor.data, values)


def _read_array(cursor: Cursor, key: str, strings_left: int) -> _Span:
    kind, count = cursor.u32(f"the element type of {key}"), cursor.u64(f"the length of {key}")
    if kind == _STRING:
        if count > strings_left:
            cursor.fail(f"metadata key {key} claims {count} strings, more than any vocabulary has")
        start = cursor.skip_strings(count, f"the {count} strings of {key}")
        return _Span(kind, start, cursor.at, count)
    if kind not in _ELEMENTS:
        cursor.fail(f"metadata key {key} is an array of type {kind}, which is unknown or nested")
    size = count * _SCALARS[kind].size
    start = cursor.take(size, f"the {count} elements of {key}")
    return _Span(kind, start, start + size, count)
