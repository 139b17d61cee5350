"""Packed weights on disk: made once per checkpoint, mapped by every later start.

Layout: tensors, each aligned to 64 bytes, then a JSON footer, its length (8 bytes, little-endian) and a
magic. The footer stands last so that packing streams one tensor at a time. Contents are never trusted as
indices: a damaged file can give wrong numbers, not a crash; a file whose footer does not hold together is
packed anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu.graph import Node
from headrace.backend.cpu.packing import WeightFormat, pack
from headrace.errors import HeadraceError, ModelFormatError
from headrace.model.checkpoint import Checkpoint, as_float32
from headrace.paths import cache_dir

PACKING_VERSION = 1
_MAGIC = b"HEADRACEPACK\x00\x00\x00\x01"
_ALIGNMENT = 64


class _Entry(msgspec.Struct, array_like=True):
    """A tensor of the file: a matrix ``[n, k]`` in a weight format, or (k = 0) a float32 vector of n."""

    offset: int
    n: int
    k: int
    format: tuple[int, int, int, int, int]


class _Footer(msgspec.Struct):
    version: int
    key: str
    tensors: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Where a tensor lies in the weights base."""

    offset: int
    n: int
    k: int
    format: WeightFormat

    @property
    def size_bytes(self) -> int:
        """Bytes it occupies, padding of its tiles included."""
        return self.format.matrix_bytes(self.n, self.k) if self.k else 4 * self.n


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A mapped file: ``data`` is the weights base (uint8), ``tensors`` say what is where."""

    data: NDArray[np.uint8]
    tensors: dict[str, PackedTensor]


def packed_weights(checkpoint: Checkpoint, nodes: list[Node]) -> PackedWeights:
    """The checkpoint's weights in the native layout, from the cache when it has them, else packed into it."""
    material = f"{checkpoint.fingerprint()} packing {PACKING_VERSION}"
    key = hashlib.sha256(material.encode()).hexdigest()[:32]
    path = cache_dir() / "packed" / f"{key}.weights"
    found = _open(path, key)
    if found is None:
        _write(path, key, checkpoint, nodes)
        found = _open(path, key)
    if found is None:
        raise HeadraceError(f"{path}: packed weights are unreadable right after they were written")
    return found


def _open(path: Path, key: str) -> PackedWeights | None:
    """The mapped file, or None when it is absent or does not hold together."""
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (FileNotFoundError, ValueError):  # ValueError: empty file
        return None
    tail = len(_MAGIC) + 8
    if data.size < tail or data[-len(_MAGIC) :].tobytes() != _MAGIC:
        return None
    length = int.from_bytes(data[-tail : -len(_MAGIC)].tobytes(), "little")
    end = data.size - tail - length
    if end < 0:
        return None
    try:
        footer = msgspec.json.decode(data[end : end + length].tobytes(), type=_Footer)
    except msgspec.DecodeError:
        return None
    if footer.version != PACKING_VERSION or footer.key != key:
        return None
    tensors = {
        name: PackedTensor(e.offset, e.n, e.k, WeightFormat(*e.format)) for name, e in footer.tensors.items()
    }
    if any(t.offset < 0 or t.n < 0 or t.k < 0 or t.offset + t.size_bytes > end for t in tensors.values()):
        return None
    return PackedWeights(np.asarray(data), tensors)


def _write(path: Path, key: str, checkpoint: Checkpoint, nodes: list[Node]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as out:
            _stream(out, key, checkpoint, nodes)
        Path(temporary).replace(path)  # a reader sees all of it or none
    except OSError as error:
        raise HeadraceError(
            f"cannot write packed weights to {path.parent}: {error.strerror}. Free space there, or point "
            "HEADRACE_CACHE at a folder with room"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _stream(out: IO[bytes], key: str, checkpoint: Checkpoint, nodes: list[Node]) -> None:
    entries: dict[str, _Entry] = {}

    def put(name: str, raw: NDArray[np.uint8], n: int, k: int, form: WeightFormat) -> None:
        offset = -(-out.tell() // _ALIGNMENT) * _ALIGNMENT
        out.write(bytes(offset - out.tell()))
        out.write(raw.data)
        fields = (form.kind, form.scale_bytes, form.has_minimum, form.group, form.zero_point)
        entries[name] = _Entry(offset, n, k, fields)

    for name, is_matrix in _tensor_names(nodes):
        tensor = checkpoint.tensor(name)
        if is_matrix:
            form, raw = pack(tensor, name)
            n, k = tensor.shape
            put(name, raw, n, k, form)
            continue
        vector = np.ascontiguousarray(as_float32(tensor))
        if not np.isfinite(vector).all():
            raise ModelFormatError(f"{name}: holds values that are not finite")
        put(name, vector.reshape(-1).view(np.uint8), vector.size, 0, WeightFormat(3))
    footer = msgspec.json.encode(_Footer(PACKING_VERSION, key, entries))
    out.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)


def _tensor_names(nodes: list[Node]) -> Iterable[tuple[str, bool]]:
    """Names and whether they are matrices: matrices in execution order, so that q, k, v lie side by side."""
    matrices = [f"{n.name}.weight" for n in nodes if n.kind in ("embed", "linear")]
    vectors = [f"{n.name}.weight" for n in nodes if n.kind in ("norm", "head_norm")]
    layer_norms = [n for n in nodes if n.kind in ("norm", "head_norm") and n.attrs["spec"].kind == "layer"]
    vectors += [f"{n.name}.bias" for n in layer_norms]
    vectors += [f"{n.name}.bias" for n in nodes if n.kind == "linear" and n.attrs["bias"]]
    yield from ((name, True) for name in dict.fromkeys(matrices))
    yield from ((name, False) for name in dict.fromkeys(vectors))
