"""Writing GGUF version 3 as tensors come. Source: the GGUF specification (docs/gguf.md of ggml).

Tensor data are collected in a file of their own, because what describes them stands before them.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.lab.compress.formats.gguf_blocks import Encoded

if TYPE_CHECKING:
    from typing import Self

ALIGNMENT = 32
_VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_ELEMENTS = {
    np.dtype(np.uint8): 0,
    np.dtype(np.int8): 1,
    np.dtype(np.uint16): 2,
    np.dtype(np.int16): 3,
    np.dtype(np.uint32): _UINT32,
    np.dtype(np.int32): _INT32,
    np.dtype(np.float32): _FLOAT32,
    np.dtype(np.bool_): _BOOL,
    np.dtype(np.uint64): 10,
    np.dtype(np.int64): 11,
    np.dtype(np.float64): 12,
}


class GGUFWriter:
    """A file being written; a context. ``metadata``: ``bool``, ``int`` (unsigned, 32 bits), ``float`` (32
    bits), ``str``, lists of ``str``, and numpy arrays; it may change until the context ends. Raises OSError.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._data_path = path.with_suffix(".part")
        self._data = self._data_path.open("wb")
        self._infos: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._data:
            if kind is not None:
                return
        with self._path.open("wb") as out:
            out.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(self._infos), len(self._metadata)))
            for key, value in self._metadata.items():
                out.write(_string(key) + _value(value))
            for info in self._infos:
                out.write(info)
            out.write(bytes(-out.tell() % ALIGNMENT))
            with self._data_path.open("rb") as data:
                shutil.copyfileobj(data, out, 1 << 24)
        self._data_path.unlink()

    def add(self, name: str, tensor: Encoded) -> None:
        """Append a tensor."""
        self._data.write(bytes(-self._data.tell() % ALIGNMENT))
        dims = tensor.shape[::-1]
        info = _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        self._infos.append(info + struct.pack("<IQ", tensor.number, self._data.tell()))
        self._data.write(tensor.data.data)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool | np.bool_):
        return struct.pack("<I?", _BOOL, bool(value))
    if isinstance(value, int | np.integer):
        return struct.pack("<II", _UINT32, int(value))
    if isinstance(value, float | np.floating):
        return struct.pack("<If", _FLOAT32, float(value))
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = _ELEMENTS[value.dtype]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + np.ascontiguousarray(value).tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
