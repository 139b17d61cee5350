"""Preflight: what a recipe will do to every tensor of a model, and why it leaves the others alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError
from headrace.lab.compress.prune_steps import PruneStep, Sparsity
from headrace.lab.compress.quantized import Scheme
from headrace.lab.compress.recipe import AwqStep, Recipe, RoundStep, SmoothQuantStep
from headrace.lab.compress.shape import shape_of
from headrace.lab.compress.targets import HEAD
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
class Pruning:
    """Which weights of one matrix become zero."""

    method: Literal["magnitude", "wanda", "sparsegpt"]
    sparsity: Sparsity
    damping: float

    def words(self) -> str:
        """As a person says it."""
        by = {"magnitude": "by magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT"}[self.method]
        return f"{self.sparsity.words()} ({by})"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: what is done to it, in words; how it is pruned and rounded if it is."""

    name: str
    shape: tuple[int, ...]
    words: str
    treatment: Treatment | None = None
    pruning: Pruning | None = None


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

    def prunings(self) -> dict[str, Pruning]:
        """Of the weights that are pruned, by canonical name."""
        return {one.name: one.pruning for one in self.tensors if one.pruning is not None}


def make_plan(architecture: Architecture, recipe: Recipe, source: Architecture | None = None) -> Plan:
    """Go through the tensors. ``source``: what the architecture was before the recipe changed its shape.

    Raises ConfigError for what the recipe cannot do to this model.
    """
    if architecture.encoder is not None:
        raise ConfigError("Compression is for models that generate; this one is an encoder.")
    shapes = expected_shapes(architecture)
    linears = _linears(shapes)
    if not architecture.tied_head:
        linears[HEAD] = shapes["head.weight"]
    names = list(linears)
    taken: dict[str, tuple[RoundStep, int | None]] = {}
    notes = _shape_notes(recipe, source or architecture, architecture)
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
    pruned = _pruned(recipe, linears)
    awq = _scaled("awq", recipe.awq, names, taken)
    smooth = _scaled("smoothquant", recipe.smoothquant, names, taken)
    tensors = []
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight") if name.endswith(".weight") else ""
        pruning = pruned.get(stem)
        if stem in taken:
            treatment = _treatment(
                stem,
                *taken[stem],
                awq=stem in awq,
                clip=stem in awq and recipe.awq is not None and recipe.awq.clip,
                smoothquant=stem in smooth,
            )
            words = _words(treatment) if pruning is None else f"{pruning.words()}, {_words(treatment)}"
            _require_order(name, pruning, treatment)
            tensors.append(TensorPlan(name, shape, words, treatment, pruning))
        elif pruning is not None:
            tensors.append(TensorPlan(name, shape, pruning.words(), pruning=pruning))
        else:
            tensors.append(
                TensorPlan(name, shape, _why_kept(name, architecture, linears, bool(awq | smooth)))
            )
    notes += _notes(architecture, recipe)
    average = next((step.average_bits for step in recipe.rounds() if step.average_bits is not None), None)
    if average is not None:
        _require_room(average, tensors)
    return Plan(tuple(tensors), tuple(notes), average)


def _shape_notes(recipe: Recipe, source: Architecture, left: Architecture) -> list[str]:
    """What the recipe makes of the shape, before it is known what of the model stays."""
    if recipe.search is not None:
        return [f"shape: {shape_of(source)}; a smaller one is searched for"]
    if recipe.reshapes:
        return [f"shape: {shape_of(source)}; what stays has {shape_of(left)}"]
    return []


def _pruned(recipe: Recipe, linears: dict[str, tuple[int, ...]]) -> dict[str, Pruning]:
    """By the name of the weight without ``.weight``; the first step that is for one has it."""
    pruned: dict[str, Pruning] = {}
    names = [name for name in linears if name != HEAD]
    for step in recipe.prunes():
        if HEAD in step.targets:
            raise ConfigError(
                "The recipe prunes the head; only the layers are: take head out of the targets."
            )
        chosen = [name for name in step.chosen(names) if name not in pruned]
        if not chosen:
            raise ConfigError("A step of the recipe prunes nothing: earlier ones have all its targets.")
        sparsity = step.zeros()
        for name in chosen:
            _require_zeros(name, step, sparsity, linears[name][1])
        pruned |= dict.fromkeys(chosen, Pruning(step.method, sparsity, step.damping))
    return pruned


def _require_zeros(name: str, step: PruneStep, sparsity: Sparsity, inputs: int) -> None:
    """Raise ConfigError if the zeros do not come out even, or are none or all."""
    if sparsity.group is not None and inputs % sparsity.group:
        raise ConfigError(
            f"pattern: {step.pattern} does not divide the {inputs} inputs of {name}: ignore it, or give "
            "sparsity instead."
        )
    if sparsity.group is None and not 0 < round(sparsity.share * inputs) < inputs:
        raise ConfigError(
            f"sparsity: {sparsity.share:g} of the {inputs} inputs of {name} is none of them, or all."
        )


def _require_order(name: str, pruning: Pruning | None, treatment: Treatment) -> None:
    """Raise ConfigError where neighbours for a pattern would be taken one by one in another order."""
    if (
        pruning is not None
        and pruning.method == "sparsegpt"
        and pruning.sparsity.group is not None
        and treatment.scheme.act_order is not None
    ):
        raise ConfigError(
            f"{name}: SparseGPT chooses among neighbours, and act_order takes them one by one in another "
            "order: leave act_order out, or prune with method: wanda."
        )


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
