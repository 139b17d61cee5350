"""What a smaller shape left of a model, for its report."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from headrace.lab.compress.cut import Cut
from headrace.lab.compress.shape import parameters
from headrace.model.architecture import Architecture


class Sizes(BaseModel):
    """Of a network, as its config.json has them, and its weights in all."""

    model_config = ConfigDict(extra="forbid")

    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    parameters: int

    @classmethod
    def of(cls, architecture: Architecture) -> Sizes:
        """Of a network whose layers are alike."""
        attention = architecture.layers[0].attention
        return cls(
            num_hidden_layers=len(architecture.layers),
            intermediate_size=architecture.layers[0].feed_forward.width,
            num_attention_heads=attention.heads,
            num_key_value_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            hidden_size=architecture.hidden_size,
            parameters=parameters(architecture),
        )


class Reshaped(BaseModel):
    """``layers``: those of the source that stay. Of each of its layers ``influence``, and ``divergence``
    without it if that was measured, in nats per token; ``searched``: the shapes that were measured last, with
    their divergence, the best first."""

    model_config = ConfigDict(extra="forbid")

    source: Sizes
    left: Sizes
    layers: list[int]
    influence: list[float]
    divergence: list[float] | None = None
    searched: list[tuple[str, float]] | None = None

    @classmethod
    def of(cls, source: Architecture, left: Architecture, cut: Cut, about: dict[str, Any]) -> Reshaped:
        """``about``: as :func:`algorithms.reshape.choose_cut` gives it."""
        return cls(source=Sizes.of(source), left=Sizes.of(left), layers=list(cut.layers), **about)

    def words(self) -> str:
        """In a line."""
        old, new = self.source.model_dump(), self.left.model_dump()
        changed = [f"{name} {old[name]} → {new[name]}" for name in old if new[name] != old[name]]
        return f"shape: {', '.join(changed)} ({new['parameters'] / old['parameters']:.1%})"
