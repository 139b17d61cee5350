"""What stays of a model that gets a smaller shape, and the model that this leaves, read like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.lab.compress.shape import Shape, reshaped, shape_of
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint, Tensor, as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.tensor_shapes import expected_shapes

Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What stays, by its place in the source, in rising order.

    ``channels`` and ``kv_heads``: of each layer of ``layers``, of its feed-forward and its attention.
    ``norms``: factors of norm weights, by the name in the source: a norm over fewer features divides by
    another mean than it was made for.
    """

    layers: tuple[int, ...]
    channels: tuple[Places, ...]
    kv_heads: tuple[Places, ...]
    hidden: Places
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The sizes that it leaves."""
        return Shape(len(self.layers), len(self.channels[0]), len(self.kv_heads[0]), len(self.hidden))


def first(architecture: Architecture, shape: Shape) -> Cut:
    """What comes first of everything: a stand-in with the right sizes."""
    return Cut(
        tuple(range(shape.layers)),
        (np.arange(shape.feed_forward),) * shape.layers,
        (np.arange(shape.kv_heads),) * shape.layers,
        np.arange(shape.hidden),
    )


class CutCheckpoint:
    """A :class:`~headrace.model.checkpoint.Checkpoint` of what stays of another.

    Tensors keep the source's type where they are only cut; quantised ones become float32.
    """

    def __init__(self, source: Checkpoint, cut: Cut) -> None:
        self.architecture = reshaped(source.architecture, cut.shape, cut.layers)
        self.path: Path = source.path
        self._source, self._cut = source, cut
        self._whole = cut.shape.hidden == shape_of(source.architecture).hidden
        self._names = tuple(expected_shapes(self.architecture))

    def names(self) -> tuple[str, ...]:
        """In the network's order."""
        return self._names

    def fingerprint(self) -> str:
        """The source's."""
        return self._source.fingerprint()

    def tensor(self, name: str) -> Tensor:
        """Read from the source, and cut."""
        if not name.startswith("layers."):
            return self._outside(name)
        _, index, part = name.split(".", 2)
        layer = int(index)
        original = f"layers.{self._cut.layers[layer]}.{part}"
        tensor = self._source.tensor(original)
        rows, columns = self._places(part, layer)
        if rows is None and columns is None:
            return tensor
        dense = as_float32(tensor) if isinstance(tensor, QuantTensor) else tensor
        if rows is not None:
            dense = dense[rows]
        if columns is not None:
            dense = dense[:, columns]
        factor = self._cut.norms.get(original, 1.0)
        return dense if factor == 1 else np.asarray(as_float32(dense) * np.float32(factor))

    def _outside(self, name: str) -> Tensor:
        """Embedding, final norm and head. An embedding whose scale follows from the hidden size is divided by
        the change of that; a head that is the same table is made up for by the norm before it."""
        tensor = self._source.tensor(name)
        if self._whole:
            return tensor
        dense = as_float32(tensor)
        dense = dense[self._cut.hidden] if dense.ndim == 1 else dense[:, self._cut.hidden]
        change = self.architecture.embedding_scale / self._source.architecture.embedding_scale
        factor = self._cut.norms.get(name, 1.0)
        if name == "embed.weight":
            factor /= change
        elif name == "final_norm.weight" and self.architecture.tied_head:
            factor *= change
        return np.asarray(dense * np.float32(factor))

    def _places(self, part: str, layer: int) -> tuple[Places | None, Places | None]:
        """The rows and columns of a layer's tensor that stay; None: all of them."""
        hidden = None if self._whole else self._cut.hidden
        stem, _, kind = part.rpartition(".")
        inside: Places | None = None
        if stem.startswith("attention."):
            spec = self._source.architecture.layers[self._cut.layers[layer]].attention
            heads = self._cut.kv_heads[layer]
            if stem.endswith("_norm"):
                return None, None  # of one head, shared by all
            width = (
                spec.head_dim if stem.endswith((".k", ".v")) else spec.head_dim * spec.heads // spec.kv_heads
            )
            if len(heads) < spec.kv_heads:
                inside = (heads[:, None] * width + np.arange(width)).reshape(-1)
        elif stem.startswith("feed_forward."):
            channels = self._cut.channels[layer]
            wide = self._source.architecture.layers[self._cut.layers[layer]].feed_forward.width
            inside = channels if len(channels) < wide else None
        else:  # a norm of the residual stream
            return hidden, None
        outward = stem.endswith((".o", ".down"))
        if kind == "bias":
            return (hidden if outward else inside), None
        return (hidden, inside) if outward else (inside, hidden)
