"""Preflight: what a recipe will do to every tensor of a model, and why it leaves the others alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError
from headrace.lab.compress.quantized import Scheme
from headrace.lab.compress.recipe import HEAD, AwqStep, Recipe, RoundStep, SmoothQuantStep
from headrace.model.architecture import Architecture
from headrace.model.weights.tensor_shapes import expected_shapes


@dataclass(frozen=True, slots=True)
class Treatment:
    """How one linear weight is rounded, and what is done to its input and range before.

    ``may_rise``: it gets 8 bits if its layer turns out to need them.
    """

    method: Literal["rtn", "gptq"]
    scheme: Scheme
    damping: float
    may_rise: bool = False
    awq: bool = False
    clip: bool = False
    smoothquant: bool = False


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: what is done to it, in words, and how it is rounded if it is."""

    name: str
    shape: tuple[int, ...]
    words: str
    treatment: Treatment | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All tensors in the network's order; ``notes`` are about the model as a whole."""

    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...]
    average_bits: float | None

    def treatments(self) -> dict[str, Treatment]:
        """Of the weights that are rounded, by canonical name."""
        return {one.name: one.treatment for one in self.tensors if one.treatment is not None}

    def of_layer(self, index: int) -> dict[str, Treatment]:
        """The same of one layer, by name without ``layers.{i}.``."""
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): treatment
            for name, treatment in self.treatments().items()
            if name.startswith(prefix)
        }


def make_plan(architecture: Architecture, recipe: Recipe) -> Plan:
    """Go through the tensors. Raises ConfigError for what the recipe cannot do to this model."""
    if architecture.encoder is not None:
        raise ConfigError("Compression is for models that generate; this one is an encoder.")
    shapes = expected_shapes(architecture)
    linears = _linears(shapes)
    if not architecture.tied_head:
        linears[HEAD] = shapes["head.weight"]
    names = list(linears)
    taken: dict[str, tuple[RoundStep, int | None]] = {}
    notes: list[str] = []
    for step in recipe.rounds():
        if architecture.tied_head and HEAD in step.targets:
            raise ConfigError(
                "The recipe rounds the head, but this model's head is its embedding table: take head out of "
                "the step's targets."
            )
        chosen = [name for name in step.chosen(names) if name not in taken]
        if not chosen:
            raise ConfigError("A step of the recipe rounds nothing: earlier ones have all its targets.")
        size = _group_size(step, {name: linears[name] for name in chosen}, notes)
        taken |= dict.fromkeys(chosen, (step, size))
    awq = _scaled("awq", recipe.awq, names, taken)
    smooth = _scaled("smoothquant", recipe.smoothquant, names, taken)
    tensors = []
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        if stem in taken and name.endswith(".weight"):
            treatment = _treatment(
                stem,
                *taken[stem],
                awq=stem in awq,
                clip=stem in awq and recipe.awq is not None and recipe.awq.clip,
                smoothquant=stem in smooth,
            )
            tensors.append(TensorPlan(name, shape, _words(treatment), treatment))
        else:
            tensors.append(
                TensorPlan(name, shape, _why_kept(name, architecture, linears, bool(awq | smooth)))
            )
    notes += _notes(architecture, recipe)
    average = next((step.average_bits for step in recipe.rounds() if step.average_bits is not None), None)
    if average is not None:
        _require_room(average, tensors)
    return Plan(tuple(tensors), tuple(notes), average)


def _require_room(average_bits: float, tensors: list[TensorPlan]) -> None:
    """Raise ConfigError if not even the smallest layer could have 8 bits."""
    layers: dict[str, int] = {}
    for one in tensors:
        if one.treatment is not None and one.treatment.may_rise:
            layer = one.name.split(".")[1]
            layers[layer] = layers.get(layer, 0) + math.prod(one.shape)
    least = 4 + 4 * min(layers.values()) / sum(layers.values())
    if average_bits < least:
        raise ConfigError(
            f"average_bits: {average_bits:g} leaves room for no layer with 8 bits: of this model's "
            f"{len(layers)} layers the smallest takes {least:.2f}."
        )


def _linears(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names without ``.weight`` of the layers' matrices."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.startswith("layers.")
    }


def _group_size(step: RoundStep, linears: dict[str, tuple[int, ...]], notes: list[str]) -> int | None:
    """The group size of all the step's targets; None for one scale per output."""
    if step.group_size == -1:
        return None
    inputs = sorted({shape[1] for shape in linears.values()})
    size = math.gcd(step.group_size, *inputs)
    if size == step.group_size:
        return size
    odd = next(width for width in inputs if width % step.group_size)
    if not step.fit:
        raise ConfigError(
            f"group_size: {step.group_size} does not divide the {odd} inputs of "
            f"{next(name for name, shape in linears.items() if shape[1] == odd)}: choose one that does"
            + (f", such as {size}" if size >= 16 else "")
            + ", -1 for one scale per output, or fit: true to take the largest that fits."
        )
    if size < 16:
        raise ConfigError(
            f"group_size: {step.group_size} does not divide {odd} inputs, and nothing from 16 on that "
            "divides it does: use group_size: -1, or ignore those weights."
        )
    notes.append(f"group_size {step.group_size} does not divide {odd} inputs: all groups are of {size}")
    return size


def _scaled(
    word: str,
    step: AwqStep | SmoothQuantStep | None,
    names: list[str],
    taken: dict[str, tuple[RoundStep, int | None]],
) -> set[str]:
    """The weights whose inputs a step scales: those of its targets that are rounded, but the head."""
    if step is None:
        return set()
    chosen = {name for name in step.chosen(names) if name in taken and name != HEAD}
    if not chosen:
        raise ConfigError(f"The step {word} scales the inputs of weights that no step rounds.")
    return chosen


def _treatment(stem: str, step: RoundStep, size: int | None, **scaling: bool) -> Treatment:
    scheme = step.scheme(step.bits, size)
    if stem != HEAD:
        return Treatment(step.method, scheme, step.damping, step.average_bits is not None, **scaling)
    # What goes into the head is not looked at: GPTQ and sensitivity are of layers.
    return Treatment("rtn", dataclasses.replace(scheme, act_order=None), step.damping)


def _words(treatment: Treatment) -> str:
    words = describe(treatment.scheme)
    if treatment.may_rise:
        words += " (8 bits where it matters most)"
    words += ", GPTQ" if treatment.method == "gptq" else ", to nearest"
    by = [word for word, used in (("AWQ", treatment.awq), ("SmoothQuant", treatment.smoothquant)) if used]
    return words + (f", inputs scaled ({', '.join(by)})" if by else "")


def _why_kept(
    name: str, architecture: Architecture, linears: dict[str, tuple[int, ...]], scaled: bool
) -> str:
    if name == "embed.weight":
        return "kept: the embedding table" + (", which is the head as well" if architecture.tied_head else "")
    if name.removesuffix(".weight") in linears:
        return "kept: no step of the recipe is for it"
    if name.endswith(".bias"):
        return "kept: biases are not rounded"
    if scaled and name.endswith(("attention_norm.weight", "feed_forward_norm.weight")):
        return "divided by the scales of the inputs that it makes"
    return "kept: norms are not rounded"


def _notes(architecture: Architecture, recipe: Recipe) -> list[str]:
    notes = []
    grouped = any(layer.attention.heads != layer.attention.kv_heads for layer in architecture.layers)
    if grouped and (recipe.awq is not None or recipe.smoothquant is not None):
        notes.append("grouped-query attention: heads that share values share the scales of o's inputs")
    if recipe.kv_cache:
        notes.append(
            "keys and values: a float8 scale of each for every layer, for engines that have one; headrace's "
            "own caches do without"
        )
    return notes


def describe(scheme: Scheme) -> str:
    """A scheme in words."""
    if scheme.kind == "float8":
        words = "float8 e4m3, one scale per output"
    else:
        groups = "one scale per output" if scheme.group_size is None else f"groups of {scheme.group_size}"
        words = f"int{scheme.bits}, {groups}, {'symmetric' if scheme.symmetric else 'zero points'}"
    if scheme.act_order is not None:
        words += f", act-order {scheme.act_order}"
    return words + (", inputs rounded per token" if scheme.input_activations else "")
