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
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu.graph import Node
from headrace.backend.cpu.packing import F32, WeightFormat, pack
from headrace.backend.cpu.pages import Writer, map_file
from headrace.errors import HeadraceError, ModelFormatError
from headrace.model.checkpoint import Checkpoint, as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.tensor_shapes import expected_shapes
from headrace.paths import cache_dir

PACKING_VERSION = 3
_MAGIC = b"HEADRACEPACK\x00\x00\x00\x01"
_ALIGNMENT = 64

Shape = tuple[int, ...]


class _Entry(msgspec.Struct, array_like=True):
    """A tensor of the file: a matrix ``[n, k]`` in a weight format, or (k = 0) a float32 or, where it is the
    order of a matrix's columns, int32 vector of n."""

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
    expected = expected_shapes(checkpoint.architecture)  # the readers hold the source to these
    shapes = {name: expected[name] for name in tensor_names(nodes)}
    found = _open(path, key, shapes)
    if found is None:
        _write(path, key, checkpoint, shapes)
        found = _open(path, key, shapes)
    if found is None:
        raise HeadraceError(f"{path}: packed weights are unreadable right after they were written")
    return found


def _open(path: Path, key: str, shapes: dict[str, Shape]) -> PackedWeights | None:
    """The mapped file, or None when it is absent or does not hold together."""
    try:
        data = map_file(path)
    except (OSError, ValueError):  # absent or unreadable; ValueError: empty
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
    except (msgspec.DecodeError, RecursionError):
        return None
    if footer.version != PACKING_VERSION or footer.key != key:
        return None
    tensors = {
        name: PackedTensor(e.offset, e.n, e.k, WeightFormat(*e.format)) for name, e in footer.tensors.items()
    }
    if any(name not in tensors or not _fits(tensors[name], shape, end) for name, shape in shapes.items()):
        return None
    for name, shape in shapes.items():
        order = tensors.get(order_name(name))
        if order is not None and not _fits(order, shape[-1:], end):
            return None
    return PackedWeights(data, tensors)


def _fits(tensor: PackedTensor, shape: Shape, end: int) -> bool:
    """Whether a tensor has the right shape, a format that kernels know, and lies before ``end``."""
    matrix = len(shape) == 2
    if (tensor.n, tensor.k) != (shape[0], shape[1] if matrix else 0) or not tensor.format.known():
        return False
    if not matrix and tensor.format.kind != F32:
        return False
    return 0 <= tensor.offset <= end - tensor.size_bytes and tensor.offset % _ALIGNMENT == 0


def _write(path: Path, key: str, checkpoint: Checkpoint, shapes: dict[str, Shape]) -> None:
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        temporary = Path(name)
        with os.fdopen(handle, "wb", buffering=0) as file:
            out = Writer(file)
            _stream(out, key, checkpoint, shapes)
            out.finish()
        temporary.replace(path)  # a reader sees all of it or none
    except OSError as error:
        raise HeadraceError(
            f"cannot write packed weights to {path.parent}: {error.strerror}. Free space there, or point "
            "HEADRACE_CACHE at a folder with room"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _stream(out: Writer, key: str, checkpoint: Checkpoint, shapes: dict[str, Shape]) -> None:
    entries: dict[str, _Entry] = {}

    def put(name: str, raw: NDArray[np.uint8], n: int, k: int, form: WeightFormat) -> None:
        offset = -(-out.tell() // _ALIGNMENT) * _ALIGNMENT
        out.write(bytes(offset - out.tell()))
        out.write(raw.data)
        fields = (form.kind, form.scale_bytes, form.offsets, form.group, form.zero_point)
        entries[name] = _Entry(offset, n, k, fields)

    ordered: dict[str, NDArray[np.int32]] = {}  # behind all others, which lie side by side
    orders: dict[bytes, _Entry] = {}  # matrices that read the same value mostly have the same one
    for name, shape in shapes.items():
        tensor = checkpoint.tensor(name)
        if len(shape) == 2:
            form, raw = pack(tensor, name)
            put(name, raw, *shape, form)
            if isinstance(tensor, QuantTensor) and tensor.order is not None:
                ordered[order_name(name)] = np.ascontiguousarray(tensor.order, np.int32)
            continue
        vector = np.ascontiguousarray(as_float32(tensor))
        if not np.isfinite(vector).all():
            raise ModelFormatError(f"{name}: holds values that are not finite")
        put(name, vector.reshape(-1).view(np.uint8), vector.size, 0, WeightFormat(F32))
    for name, order in ordered.items():
        known = orders.get(order.tobytes())
        if known is None:
            put(name, order.view(np.uint8), order.size, 0, WeightFormat(F32))
            orders[order.tobytes()] = entries[name]
        else:
            entries[name] = known
    footer = msgspec.json.encode(_Footer(PACKING_VERSION, key, entries))
    out.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)


def order_name(matrix: str) -> str:
    """What the order of a matrix's columns is called, where it is not that of its inputs."""
    return f"{matrix.removesuffix('.weight')}.order"


def tensor_names(nodes: list[Node]) -> list[str]:
    """Matrices first, in execution order, so that q, k, v lie side by side; then vectors."""
    matrices = [f"{n.name}.weight" for n in nodes if n.kind in ("embed", "linear")]
    vectors = [f"{n.name}.weight" for n in nodes if n.kind in ("norm", "head_norm")]
    layer_norms = [n for n in nodes if n.kind in ("norm", "head_norm") and n.attrs["spec"].kind == "layer"]
    vectors += [f"{n.name}.bias" for n in layer_norms]
    vectors += [f"{n.name}.bias" for n in nodes if n.kind == "linear" and n.attrs["bias"]]
    return list(dict.fromkeys(matrices + vectors))
