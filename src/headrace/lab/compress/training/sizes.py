"""A student's shape as a YAML file gives it: sizes that differ from the teacher's."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import ConfigError
from headrace.model.architecture import Architecture, LayerSpec

Size = Annotated[int, Field(ge=1, le=1 << 20)]


class Sizes(BaseModel):
    """What is not named is the teacher's. ``layers``: how many, or which of the teacher's, from 0.

    With ``layers`` alone they are copies of the teacher's; with another size all weights are new.
    """

    model_config = ConfigDict(extra="forbid")

    layers: Size | list[Annotated[int, Field(ge=0)]] | None = None
    hidden_size: Size | None = None
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    feed_forward_width: Size | None = None

    @property
    def copies(self) -> bool:
        """Whether the student's layers are some of the teacher's."""
        return self.model_fields_set <= {"layers"}

    def chosen(self, teacher: Architecture) -> list[int]:
        """Which of the teacher's layers are copied. Raises ConfigError if it has not so many."""
        count = len(teacher.layers)
        if isinstance(self.layers, list):
            chosen = self.layers
            if not chosen or sorted(set(chosen)) != chosen or chosen[-1] >= count:
                raise ConfigError(
                    f"layers: {chosen} must be some of the teacher's 0 to {count - 1}, in their order."
                )
            return chosen
        if self.layers is None or self.layers > count:
            raise ConfigError(
                f"layers: {self.layers or 'missing'}: copies of the teacher's layers can be 1 to {count}."
            )
        return spread(count, self.layers)

    def architecture(self, teacher: Architecture) -> Architecture:
        """A new model of these sizes, otherwise as the teacher. Raises ConfigError for what makes no network.

        Its layers are the teacher's first one with other sizes, and its windows follow the teacher's order.
        """
        if isinstance(self.layers, list):
            raise ConfigError("layers: a list names layers to copy, which other sizes do not allow.")
        count = len(teacher.layers) if self.layers is None else self.layers
        layers = tuple(self._layer(teacher.layers[place % len(teacher.layers)]) for place in range(count))
        hidden = self.hidden_size or teacher.hidden_size
        scale = teacher.embedding_scale
        if scale != 1.0:
            scale = hidden**0.5  # Gemma's
        return replace(teacher, layers=layers, hidden_size=hidden, embedding_scale=scale)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        old = layer.attention
        heads = self.heads or old.heads
        kv_heads = self.kv_heads or min(old.kv_heads, heads)
        head_dim = self.head_dim or old.head_dim
        if heads % kv_heads:
            raise ConfigError(f"heads: {heads} must be a multiple of kv_heads: {kv_heads}.")
        if head_dim % 2:
            raise ConfigError(f"head_dim: {head_dim} must be even, for rotary embedding.")
        rope = old.rope
        if rope is not None and head_dim != old.head_dim:
            if rope.factors or rope.dim != old.head_dim:
                raise ConfigError(
                    "head_dim: this teacher's rotary embedding is fitted to its own; leave it out."
                )
            rope = replace(rope, dim=head_dim)
        scale = old.scale * (old.head_dim / head_dim) ** 0.5
        attention = replace(old, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, scale=scale)
        width = self.feed_forward_width or layer.feed_forward.width
        return replace(layer, attention=attention, feed_forward=replace(layer.feed_forward, width=width))


def spread(layers: int, wanted: int) -> list[int]:
    """``wanted`` of so many layers, evenly, the first and the last among them."""
    if wanted == 1:
        return [0]
    return [round(place * (layers - 1) / (wanted - 1)) for place in range(wanted)]
