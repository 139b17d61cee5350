"""GGUF files, version 2 and 3: memory-mapped, decoded where they are asked for, and never believed.

Source: the GGUF specification (docs/gguf.md of ggml). Layout: magic, version, counts, metadata, tensor
descriptions, padding to the alignment, tensor data. Little-endian throughout.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import ModelNotFoundError
from headrace.model.checkpoint import Tensor
from headrace.model.weights.gguf_cursor import Cursor, format_error
from headrace.model.weights.gguf_metadata import MAX_KEYS, read_metadata
from headrace.model.weights.gguf_types import (
    TYPES,
    Bytes,
    GGUFType,
    read_dense,
    read_quantized,
    unsupported_type,
)
from headrace.model.weights.pickles import refuse_pickle

MAGIC = b"GGUF"
_HEADER_BYTES = 24
_MAX_TENSORS = 1 << 17
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is row-major (``[out, in]``); ``offset`` is absolute, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int
    size: int


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name in file order.

    Raises ModelNotFoundError if there is no such file, ModelFormatError for anything else that is wrong with
    it. The file stays mapped as long as this object, or an array read from it, lives.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise format_error(path, "it is not a regular file")
            with path.open("rb") as handle:
                self.stat = os.fstat(handle.fileno())
                refuse_pickle(path, handle.read(16))
                if self.stat.st_size < _HEADER_BYTES:
                    raise format_error(path, f"it has only {self.stat.st_size} bytes, less than a header")
                data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"There is no file {path}.") from None
        except OSError as error:
            raise format_error(path, f"it cannot be read ({error.strerror or error})") from None
        cursor = Cursor(path, data)
        tensor_count, key_count = _read_header(cursor)
        self.metadata = read_metadata(cursor, key_count)
        self.tensors = _read_tensors(cursor, tensor_count, self.metadata.get("general.alignment", 32))
        self._bytes: Bytes = np.frombuffer(data, dtype=np.uint8)

    def tensor(self, name: str) -> Tensor:
        """One tensor: a read-only view of the map if it holds floats, else unpacked into a QuantTensor.

        Raises KeyError for a name that is not in ``tensors``; ModelFormatError for a quantised tensor
        that is no matrix or whose scales are not finite.
        """
        info = self.tensors[name]
        data = self._bytes[info.offset : info.offset + info.size]
        if info.type.unpack is None:
            return read_dense(data, info.type, info.shape)
        if len(info.shape) != 2:
            raise format_error(
                self.path, f"tensor {name} is stored as {info.type.name} but is no matrix: {list(info.shape)}"
            )
        quantized = read_quantized(data, info.type, info.shape[0], info.shape[1])
        for part in (quantized.scale, quantized.minimum):
            if part is not None and not np.isfinite(part).all():
                raise format_error(self.path, f"tensor {name} has scales that are NaN or infinite")
        return quantized


def _read_header(cursor: Cursor) -> tuple[int, int]:
    """The counts of tensors and of metadata keys, after the magic and the version."""
    cursor.take(len(MAGIC), "the magic")
    if cursor.data[:4] != MAGIC:
        cursor.fail(f"it starts with {cursor.data[:4]!r}, not with {MAGIC!r}")
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        cursor.fail("it is big-endian; convert it to little-endian")
    if version not in (2, 3):
        cursor.fail(f"it has version {version}; versions 2 and 3 are supported: convert the model again")
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    if tensor_count > _MAX_TENSORS:
        cursor.fail(f"it claims {tensor_count} tensors (at most {_MAX_TENSORS} are accepted)")
    if key_count > MAX_KEYS:
        cursor.fail(f"it claims {key_count} metadata keys (at most {MAX_KEYS} are accepted)")
    return tensor_count, key_count


def _read_tensors(cursor: Cursor, count: int, alignment: object) -> dict[str, TensorInfo]:
    """The tensor descriptions, each checked against the file's size and against its neighbours."""
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}; it must be a power of two up to {_MAX_ALIGNMENT}")
    relative = [_read_tensor(cursor, number, alignment) for number in range(count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in relative:
        if name in tensors:
            cursor.fail(f"tensor {name} appears twice")
        size = math.prod(shape) // kind.block_size * kind.block_bytes
        if data_start + offset + size > cursor.size:
            cursor.fail(
                f"tensor {name} needs {size} bytes at byte {data_start + offset}, but the file has "
                f"{cursor.size}: it is truncated or corrupt"
            )
        tensors[name] = TensorInfo(name, shape, kind, data_start + offset, size)
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in itertools.pairwise(by_offset):
        if before.offset + before.size > after.offset:
            cursor.fail(f"tensors {before.name} and {after.name} overlap")
    return tensors


def _read_tensor(cursor: Cursor, number: int, alignment: int) -> tuple[str, tuple[int, ...], GGUFType, int]:
    """One description: name, row-major shape, type, and offset from where the data start."""
    name = cursor.name(f"the name of tensor {number}")
    rank = cursor.u32(f"the rank of {name}")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        cursor.fail(f"tensor {name} has {rank} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.u64(f"the shape of {name}") for _ in range(rank))[::-1]
    number = cursor.u32(f"the type of {name}")
    kind = TYPES.get(number)
    if kind is None:
        cursor.fail(unsupported_type(number, name))
    if 0 in shape:
        cursor.fail(f"tensor {name} has the shape {list(shape)}: no dimension may be zero")
    if shape[-1] % kind.block_size:
        cursor.fail(f"tensor {name} has rows of {shape[-1]}, but {kind.name} has blocks of {kind.block_size}")
    offset = cursor.u64(f"the offset of {name}")
    if offset % alignment:
        cursor.fail(f"tensor {name} starts at {offset}, not a multiple of the alignment {alignment}")
    return name, shape, kind, offset
