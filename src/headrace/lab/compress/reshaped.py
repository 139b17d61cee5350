"""What a smaller shape leaves of a model: before it is known, when it is, and for the report."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from headrace.lab.compress.budget import budget_of, candidates
from headrace.lab.compress.calibration import Calibration
from headrace.lab.compress.cut import Cut, CutCheckpoint, first
from headrace.lab.compress.recipe import Recipe
from headrace.lab.compress.shape import asked_shape, parameters, shape_of
from headrace.lab.compress.work import Work
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint
from headrace.model.store import Progress


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


def stand_in(checkpoint: Checkpoint, recipe: Recipe, threads: int) -> Checkpoint:
    """The model, or something with the sizes of what is to be left of it, which is enough for a plan.

    What a search will find is checked when it is found; but a budget that nothing meets is refused here,
    where that can be told without measuring. Raises ConfigError for that, and for a shape that cannot be.
    """
    if not recipe.reshapes:
        return checkpoint
    architecture = checkpoint.architecture
    search = recipe.search
    if search is None:
        return CutCheckpoint(
            checkpoint, first(architecture, asked_shape(architecture, recipe.depth, recipe.width))
        )
    if search.latency is None:
        candidates(architecture, search.dimensions, budget_of(search, architecture, threads))
    return CutCheckpoint(checkpoint, first(architecture, shape_of(architecture)))


def reshape(
    checkpoint: Checkpoint,
    recipe: Recipe,
    calibration: Calibration,
    work: Work,
    *,
    threads: int,
    progress: Progress,
) -> tuple[Checkpoint, Reshaped]:
    """What is left of the model, and how it was chosen. Raises what :func:`choose_cut` raises."""
    from headrace.lab.compress.algorithms.reshape import choose_cut

    cut, about = choose_cut(checkpoint, recipe, calibration, work, threads=threads, progress=progress)
    left = CutCheckpoint(checkpoint, cut)
    return left, Reshaped.of(checkpoint.architecture, left.architecture, cut, about)
