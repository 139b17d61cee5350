"""How long a recipe will take on this machine, and how much memory: counted, and timed on one product."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.lab.compress.algorithms.pipeline import SEARCH_ROWS, SENSITIVITY_TOKENS
from headrace.lab.compress.plan import Plan
from headrace.lab.compress.recipe import Recipe
from headrace.model.architecture import Architecture
from headrace.model.weights.tensor_shapes import expected_shapes

_SIDE = 1024
_TIMED_S = 0.1
_SEARCH_TOKENS = 15 * SENSITIVITY_TOKENS  # of thirty shapes: a quarter for each, all for the best quarter
_ELEMENTWISE = 40  # passes over a weight that rounding and its searches cost, each worth this many operations


@dataclass(frozen=True, slots=True)
class Estimate:
    """``seconds`` of computing before the model is written and evaluated; ``memory_bytes`` at the peak."""

    seconds: float
    memory_bytes: int


def estimate(
    source: Architecture,
    left: Architecture,
    recipe: Recipe,
    plan: Plan,
    tokens: int,
    threads: int = 0,
) -> Estimate:
    """For a calibration of ``tokens`` (0: none), and of ``source`` what is ``left`` to prune and round."""
    operations, memory = 0.0, 0.0
    if plan.treatments() or plan.prunings():
        operations, memory = _of_layers(left, recipe, plan, tokens)
    if recipe.reshapes:
        more, most = _of_looking(source, recipe, tokens)
        operations, memory = operations + more, max(memory, most)
    return Estimate(operations / _operations_per_second(threads), int(memory))


def _of_looking(architecture: Architecture, recipe: Recipe, tokens: int) -> tuple[float, float]:
    """Operations and bytes of choosing what stays. Of a search, with about as many shapes as there can be."""
    shapes, layers = expected_shapes(architecture), len(architecture.layers)
    elements = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    head = architecture.vocab_size * architecture.hidden_size
    matrices = {name: shape for name, shape in shapes.items() if name.startswith("layers.0.")}
    squares = sum(width**2 for width in _widths(matrices))
    operations = 2.0 * tokens * (elements + layers * squares)
    if recipe.depth_by == "kl":
        operations += SENSITIVITY_TOKENS * layers * (elements + 2 * head)
    if recipe.search is not None:
        operations += 2.0 * _SEARCH_TOKENS * (elements + 2 * head)
    streams = 3 * tokens * architecture.hidden_size
    if recipe.depth_by == "kl":
        streams = max(streams, SENSITIVITY_TOKENS * architecture.hidden_size * (2 * layers + 2) + head)
    return operations, 4.0 * (2 * elements / layers + squares + streams)


def _of_layers(architecture: Architecture, recipe: Recipe, plan: Plan, tokens: int) -> tuple[float, float]:
    """Operations and bytes of pruning and rounding."""
    shapes = expected_shapes(architecture)
    operations, largest = 0.0, 0
    for index in range(len(architecture.layers)):
        prefix = f"layers.{index}."
        matrices: dict[str, tuple[int, ...]] = {
            name: shape for name, shape in shapes.items() if name.startswith(prefix) and len(shape) == 2
        }
        elements = sum(math.prod(shape) for shape in matrices.values())
        treatments = plan.of_layer(index)
        prunings = plan.prunings()
        operations += _ELEMENTWISE * elements
        if tokens:
            again = recipe.kv_cache or prunings or any(one.method == "gptq" for one in treatments.values())
            passes = 2 if again else 1
            operations += 2 * passes * elements * tokens
            operations += 2 * tokens * sum(width**2 for width in _widths(matrices))
            for name, one in treatments.items():
                rows, width = shapes[prefix + name]
                if one.awq and recipe.awq is not None:
                    operations += recipe.awq.grid * (2 * rows * width**2 + _ELEMENTWISE * rows * width)
                if one.smoothquant and recipe.smoothquant is not None and recipe.smoothquant.alpha is None:
                    operations += 20 * (2 * rows * width * SEARCH_ROWS + _ELEMENTWISE * rows * width)
                if one.method == "gptq":
                    operations += 2 * rows * width**2 + 3 * width**3
            for name, pruning in prunings.items():
                if name.startswith(prefix) and pruning.method == "sparsegpt":
                    rows, width = shapes[name]
                    operations += 2 * rows * width**2 + 3 * width**3
            if plan.average_bits is not None:
                operations += 2 * elements * SENSITIVITY_TOKENS * (index + 2)
        largest = max(largest, elements + sum(width**2 for width in _widths(matrices)))
    memory = 4.0 * (5 * largest + 3 * tokens * architecture.hidden_size)
    if plan.average_bits is not None:
        streams = SENSITIVITY_TOKENS * architecture.hidden_size * (2 * len(architecture.layers) + 2)
        memory = max(memory, 4.0 * (streams + architecture.vocab_size * architecture.hidden_size))
    return operations, memory


def _widths(matrices: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The widths of the layer's four inputs."""
    parts = ("attention.q.weight", "attention.o.weight", "feed_forward.up.weight", "feed_forward.down.weight")
    return [shape[1] for name, shape in matrices.items() if name.split(".", 2)[2] in parts]


def _operations_per_second(threads: int) -> float:
    if threads > 0:
        torch.set_num_threads(threads)
    a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    torch.mm(a, b)
    began, products = time.monotonic(), 0
    while time.monotonic() - began < _TIMED_S:
        torch.mm(a, b)
        products += 1
    return products * 2 * _SIDE**3 / (time.monotonic() - began)
