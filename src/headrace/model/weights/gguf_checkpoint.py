"""A GGUF file as a :class:`~headrace.model.checkpoint.Checkpoint`: canonical names, canonical row order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Tensor
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.gguf import GGUFFile
from headrace.model.weights.gguf_architecture import ROPE_FACTORS, read_architecture, stores_interleaved_rope
from headrace.model.weights.gguf_cursor import format_error
from headrace.model.weights.gguf_names import gguf_name
from headrace.model.weights.load_quantization import Quantization, narrow
from headrace.model.weights.tensor_shapes import expected_shapes


class GGUFCheckpoint:
    """An open GGUF model. ``quantization`` narrows the float matrices; quantised ones keep their format.

    Raises ModelNotFoundError, or ModelFormatError for a file that is damaged, of an unsupported
    architecture, or whose tensors are not those its architecture calls for.
    """

    architecture: Architecture
    path: Path

    def __init__(self, path: Path, *, quantization: Quantization | None = None) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self.architecture = read_architecture(self.file)
        self._quantization: Quantization | None = quantization
        self._stored = self._match_tensors()
        self._rows = self._permuted_rows() if stores_interleaved_rope(self.architecture) else {}

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, in file order."""
        return tuple(self._stored)

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name; floats as read-only views of the file, unless rows were permuted.

        Raises ModelFormatError for a name that is not in :meth:`names`, or scales that are not finite.
        """
        if name not in self._stored:
            raise format_error(self.path, f"it has no tensor {name}")
        tensor = self.file.tensor(self._stored[name])
        rows = self._rows.get(name)
        if rows is not None:
            tensor = tensor.take_rows(rows) if isinstance(tensor, QuantTensor) else tensor[rows]
        return narrow(name, tensor, self._quantization)

    def fingerprint(self) -> str:
        """Size, mtime and inode of the file, and the load-time quantisation."""
        stat = self.file.stat
        parts = (stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino, self._quantization or "as-stored")
        return "gguf:" + ":".join(str(part) for part in parts)

    def _match_tensors(self) -> dict[str, str]:
        """Canonical to stored name, in file order; refuses missing, surplus and misshapen tensors."""
        wanted = {
            gguf_name(name): (name, shape) for name, shape in expected_shapes(self.architecture).items()
        }
        missing = [stored for stored in wanted if stored not in self.file.tensors]
        if missing:
            raise format_error(self.path, f"tensor {missing[0]} is missing{_and_more(missing)}")
        surplus = [stored for stored in self.file.tensors if stored not in wanted and stored != ROPE_FACTORS]
        if surplus:  # running without it would give plausible nonsense
            raise format_error(
                self.path,
                f"tensor {surplus[0]}{_and_more(surplus)} has no place in the {self.architecture.family} "
                "architecture as headrace knows it",
            )
        for stored, (_, shape) in wanted.items():
            info = self.file.tensors[stored]
            if info.shape != shape:
                raise format_error(
                    self.path,
                    f"tensor {stored} has shape {list(info.shape)}; its metadata call for {list(shape)}",
                )
            if len(shape) == 1 and info.type.unpack is not None:
                raise format_error(
                    self.path, f"tensor {stored} is {info.type.name}; norms and biases are floats"
                )
        return {wanted[stored][0]: stored for stored in self.file.tensors if stored in wanted}

    def _permuted_rows(self) -> dict[str, NDArray[np.intp]]:
        """For each q and k tensor, the stored row of each canonical one."""
        rows: dict[str, NDArray[np.intp]] = {}
        for index, layer in enumerate(self.architecture.layers):
            spec = layer.attention
            assert spec.rope is not None
            for part, heads in (("q", spec.heads), ("k", spec.kv_heads)):
                order = half_split_rows(heads, spec.head_dim, spec.rope.dim)
                for kind in ("weight", "bias"):
                    rows[f"layers.{index}.attention.{part}.{kind}"] = order
        return rows


def half_split_rows(heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.intp]:
    """Stored row of each canonical row, ``[heads * head_dim]``, for rotary pairs stored as neighbours.

    Canonically feature ``i`` pairs with ``i + rotary_dim / 2``; stored, ``2 i`` with ``2 i + 1``.
    """
    within = np.arange(head_dim)
    within[:rotary_dim] = np.arange(rotary_dim).reshape(-1, 2).T.ravel()
    return (np.arange(heads)[:, None] * head_dim + within).ravel()


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
