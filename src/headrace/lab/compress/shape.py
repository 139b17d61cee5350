"""The sizes of a network that can shrink, and what is left of an architecture with smaller ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.lab.compress.prune_steps import DepthStep, WidthStep
from headrace.model.architecture import Architecture, LayerSpec
from headrace.model.weights.tensor_shapes import expected_shapes

_MULTIPLE = 32  # what kernels and formats group inputs by


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How many layers, feed-forward channels, key and value heads (each with its query heads) and features of
    the residual stream there are; the same in every layer."""

    layers: int
    feed_forward: int
    kv_heads: int
    hidden: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden size {self.hidden}, feed-forward {self.feed_forward}, "
            f"{self.kv_heads} key and value heads"
        )

    def within(self, other: Shape) -> bool:
        """Whether nothing of it is larger than of the other."""
        return (
            self.layers <= other.layers
            and self.feed_forward <= other.feed_forward
            and self.kv_heads <= other.kv_heads
            and self.hidden <= other.hidden
        )


def shape_of(architecture: Architecture) -> Shape:
    """Raises ConfigError for a network whose layers have several sizes."""
    if architecture.encoder is not None:
        raise ConfigError("Compression is for models that generate; this one is an encoder.")
    found = {
        Shape(
            len(architecture.layers),
            layer.feed_forward.width,
            layer.attention.kv_heads,
            architecture.hidden_size,
        )
        for layer in architecture.layers
    }
    if len(found) > 1:
        raise ConfigError("The model's layers have several sizes: its shape cannot be changed.")
    return found.pop()


def asked_shape(architecture: Architecture, depth: DepthStep | None, width: WidthStep | None) -> Shape:
    """What two steps leave. Raises ConfigError if that is nothing, or all there is."""
    old = shape_of(architecture)
    new = old
    if depth is not None:
        layers = round(depth.keep * old.layers)
        if not 0 < layers < old.layers:
            raise ConfigError(
                f"keep: {depth.keep:g} of {old.layers} layers leaves {'all' if layers else 'none'} of them."
            )
        new = replace(new, layers=layers)
    if width is not None:
        wide = replace(
            new,
            feed_forward=rounded(old.feed_forward, width.feed_forward),
            kv_heads=max(1, round(width.heads * old.kv_heads)),
            hidden=rounded(old.hidden, width.hidden),
        )
        if wide == new:
            raise ConfigError(
                f"The width step takes nothing away: this model has {old}, and counts are rounded, channels "
                f"and features to multiples of {_MULTIPLE}."
            )
        new = wide
    return new


def rounded(size: int, share: float) -> int:
    """The share of a size, as a multiple of 32 where the size is one."""
    step = step_of(size)
    return min(size, max(step, round(share * size / step) * step))


def step_of(size: int) -> int:
    """What a size shrinks in steps of."""
    return _MULTIPLE if size % _MULTIPLE == 0 else 1


def reshaped(architecture: Architecture, shape: Shape, layers: Sequence[int] | None = None) -> Architecture:
    """The architecture with smaller sizes and those ``layers`` that stay, by default the first ones."""
    stay = range(shape.layers) if layers is None else layers
    groups: dict[int | None, int] = {}  # as readers number them: by window, from the first layer on
    specs: list[LayerSpec] = []
    for index in stay:
        layer = architecture.layers[index]
        old = layer.attention
        attention = replace(old, kv_heads=shape.kv_heads, heads=shape.kv_heads * (old.heads // old.kv_heads))
        feed_forward = replace(layer.feed_forward, width=shape.feed_forward)
        group = groups.setdefault(old.window, len(groups))
        specs.append(replace(layer, attention=attention, feed_forward=feed_forward, kv_group=group))
    scale = architecture.embedding_scale
    if scale != 1:
        scale = shape.hidden**0.5  # as every reader of a config.json of this family has it
    return replace(architecture, layers=tuple(specs), hidden_size=shape.hidden, embedding_scale=scale)


def parameters(architecture: Architecture) -> int:
    """Weights in all."""
    return sum(math.prod(shape) for shape in expected_shapes(architecture).values())
