"""What a shape may cost, and the largest shapes that cost no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from headrace.errors import ConfigError
from headrace.lab.compress.prune_steps import Dimension, SearchStep
from headrace.lab.compress.shape import Shape, parameters, reshaped, rounded, shape_of, step_of
from headrace.model.architecture import Architecture

if TYPE_CHECKING:
    from headrace.backend.cpu.limits import Limits

_CONTEXT = 512  # tokens before the one whose time a latency is
_LEAST_LAYERS, _LEAST_CHANNELS, _LEAST_HEADS = 0.5, 0.4, 0.5  # shares below which little of a model is left
_HIDDEN = (1.0, 0.875, 0.75)
_MOST_DEPTHS, _MOST_HEADS = 6, 3


@dataclass(frozen=True, slots=True)
class Budget:
    """``cost`` of an architecture, and the ``limit`` that it must not pass, both in ``unit``."""

    cost: Callable[[Architecture], float]
    limit: float
    unit: str


def budget_of(
    step: SearchStep, architecture: Architecture, threads: int, limits: Limits | None = None
) -> Budget:
    """Raises ConfigError for a budget that the model is within as it is. A latency measures this machine
    first, for some seconds, or takes its ``limits``.
    """
    if step.parameters is not None:
        return Budget(parameters, step.parameters * parameters(architecture), "parameters")
    if step.size_mib is not None:
        size = _mib(architecture)
        if step.size_mib >= size:
            raise ConfigError(
                f"size_mib: {step.size_mib:g} is no less than the {size:.1f} MiB that the model takes."
            )
        return Budget(_mib, step.size_mib, "MiB in 16 bits")
    assert step.latency is not None
    cost = _token_ms(threads, limits)
    return Budget(cost, step.latency * cost(architecture), "ms for a token")


def candidates(architecture: Architecture, dimensions: list[Dimension], budget: Budget) -> list[Shape]:
    """The largest shapes within the budget; none is larger in one thing and as large in all others.

    Every mix of a few depths, numbers of heads and hidden sizes gets the widest feed-forward that fits.
    Raises ConfigError if nothing fits.
    """
    old = shape_of(architecture)
    found, least = [], old
    for layers, heads, hidden in product(
        _depths(old.layers) if "depth" in dimensions else (old.layers,),
        _heads(old.kv_heads) if "heads" in dimensions else (old.kv_heads,),
        sorted({rounded(old.hidden, share) for share in _HIDDEN})
        if "hidden" in dimensions
        else (old.hidden,),
    ):
        narrow, wide = rounded(old.feed_forward, _LEAST_CHANNELS), old.feed_forward
        if "feed_forward" not in dimensions:
            narrow = wide
        shape = Shape(layers, narrow, heads, hidden)
        if shape.within(least):
            least = shape
        if (widest := _widest(architecture, shape, wide, budget)) is not None:
            found.append(widest)
    if not found:
        cost = budget.cost(reshaped(architecture, least))
        raise ConfigError(
            f"No shape meets the budget of {budget.limit:.4g} {budget.unit}: the smallest that is looked at "
            f"has {least}, and costs {cost:.4g}. Raise the budget, or search in more dimensions."
        )
    return [one for one in found if not any(one != other and one.within(other) for other in found)]


def _widest(architecture: Architecture, shape: Shape, wide: int, budget: Budget) -> Shape | None:
    """With as many feed-forward channels as the budget leaves room for."""

    def fits(channels: int) -> bool:
        sized = replace(shape, feed_forward=channels)
        return budget.cost(reshaped(architecture, sized)) <= budget.limit

    if not fits(shape.feed_forward):
        return None
    step = step_of(wide)
    low, high = shape.feed_forward // step, wide // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return replace(shape, feed_forward=low * step)


def _depths(layers: int) -> list[int]:
    least = max(1, round(_LEAST_LAYERS * layers))
    count = min(_MOST_DEPTHS, layers - least + 1)
    return sorted({layers - round(at * (layers - least) / max(count - 1, 1)) for at in range(count)})


def _heads(heads: int) -> list[int]:
    least = max(1, round(_LEAST_HEADS * heads))
    return list(range(heads, least - 1, -1))[:_MOST_HEADS]


def _mib(architecture: Architecture) -> float:
    return 2 * parameters(architecture) / 2**20


def _token_ms(threads: int, limits: Limits | None) -> Callable[[Architecture], float]:
    """What ``headrace plan --here`` predicts of weights in 16 bits on our engine."""
    from headrace.backend.cpu.cores import usable_cores
    from headrace.lab.plan.engine_model import EngineModel
    from headrace.lab.plan.hardware import read_hardware
    from headrace.lab.plan.here import ceilings
    from headrace.lab.plan.network import Network
    from headrace.lab.plan.recorded_step import record_step
    from headrace.lab.plan.source import Source

    known, factors = limits or ceilings(threads or usable_cores()), read_hardware().engine

    def cost(architecture: Architecture) -> float:
        program = record_step(Source(Network("candidate", architecture)))
        return 1000 * EngineModel(program, known, factors).decode_step_s(1, _CONTEXT)

    return cost
