"""A recipe: ordered steps, each with the tensors it is for and its settings; built in, or a YAML file."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import ConfigError
from headrace.lab.compress.quantized import Activations, ActOrder, Kind, Scheme
from headrace.yaml_file import nearest, read_yaml

LINEARS = "linears"
HEAD = "head"
_ATTENTION, _FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")
_WORDS = {
    LINEARS: "layers.*",
    "attention": "layers.*.attention.*",
    "feed_forward": "layers.*.feed_forward.*",
    **{part: f"layers.*.attention.{part}" for part in _ATTENTION},
    **{part: f"layers.*.feed_forward.{part}" for part in _FEED_FORWARD},
    HEAD: HEAD,
}
"""Short names of targets, and the patterns that they stand for."""


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid")

    targets: list[str] = Field(default=[LINEARS], min_length=1)
    ignore: list[str] = []

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that the step is for. Raises ConfigError for a pattern that is for none."""
        ignored = set(matching(self.ignore, names))
        return [name for name in matching(self.targets, names) if name not in ignored]


class AwqStep(_Step):
    """Scales channels so that those which see large inputs lose less (AWQ, arXiv 2306.00978).

    ``grid`` exponents from 0 on are tried; ``clip`` also searches how far each group's range may shrink.
    """

    step: Literal["awq"]
    grid: int = Field(default=20, ge=2, le=200)
    clip: bool = True


class SmoothQuantStep(_Step):
    """Moves the range of inputs into the weights before them (SmoothQuant, arXiv 2211.10438)."""

    step: Literal["smoothquant"]
    alpha: float = Field(default=0.5, ge=0, le=1)


class RoundStep(_Step):
    """Rounds weights: to the nearest code, or one input after the other with errors made up for by those
    that follow (``gptq``, arXiv 2210.17323).

    ``group_size`` -1: one scale per output. ``fit``: where it does not divide the inputs of all targets, take
    the largest smaller one that does. ``average_bits``: ``bits`` is the least, and the layers that suffer
    most from it get 8, as many as keep the mean over all weights below this.
    """

    step: Literal["round"]
    method: Literal["rtn", "gptq"] = "rtn"
    kind: Kind = "int"
    bits: Literal[4, 8] = 4
    average_bits: float | None = None
    group_size: int = 128
    fit: bool = False
    symmetric: bool = True
    input_activations: Activations | None = None
    act_order: ActOrder | None = None
    damping: float = Field(default=0.01, gt=0, le=1)

    @model_validator(mode="after")
    def _possible(self) -> RoundStep:
        whole = self.group_size == -1
        if not whole and (self.group_size < 16 or self.group_size % 16):
            raise ValueError(
                f"group_size is 16 or a multiple of it, or -1 for one scale per output; not {self.group_size}"
            )
        rows_of_8 = self.bits == 8 and whole and self.symmetric
        if self.kind == "float8" and not (rows_of_8 and self.method == "rtn"):
            raise ValueError("float8 goes with bits: 8, group_size: -1, symmetric: true, method: rtn")
        if self.input_activations is not None and not rows_of_8:
            raise ValueError("input_activations go with bits: 8, group_size: -1, symmetric: true")
        if self.act_order is not None and self.method != "gptq":
            raise ValueError("act_order is of method: gptq")
        if self.act_order == "group" and whole:
            raise ValueError("act_order: group makes groups in another order; group_size: -1 has none")
        if self.average_bits is not None and not (self.bits == 4 and 4 < self.average_bits < 8):
            raise ValueError("average_bits lies between 4 and 8, and goes with bits: 4")
        return self

    def scheme(self, bits: Literal[4, 8], group_size: int | None) -> Scheme:
        """How a weight is held that gets ``bits`` and a group size that fits it."""
        return Scheme(
            bits=bits,
            group_size=group_size,
            symmetric=self.symmetric,
            kind=self.kind,
            input_activations=self.input_activations,
            act_order=self.act_order,
        )


class KVCacheStep(BaseModel):
    """Finds scales with which other engines keep keys and values in float8 e4m3: one of each for a layer, the
    largest magnitude that the calibration shows over the largest number of the format."""

    model_config = ConfigDict(extra="forbid")

    step: Literal["kv_cache"]


Step = Annotated[AwqStep | SmoothQuantStep | RoundStep | KVCacheStep, Field(discriminator="step")]


class Recipe(BaseModel):
    """Steps in their order: those that scale channels, those that round, and the one for the KV cache."""

    model_config = ConfigDict(extra="forbid")

    steps: list[Step] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> Recipe:
        kinds = [step.step for step in self.steps]
        if "round" not in kinds:
            raise ValueError("no step rounds anything: add one with step: round")
        if "kv_cache" in kinds[:-1]:
            raise ValueError("kv_cache is the last step, and there is one at most")
        if any(kind in ("awq", "smoothquant") for kind in kinds[kinds.index("round") :]):
            raise ValueError("steps that scale channels (awq, smoothquant) come before those that round")
        if kinds.count("awq") > 1 or kinds.count("smoothquant") > 1:
            raise ValueError("awq and smoothquant can be steps once each")
        if sum(step.average_bits is not None for step in self.rounds()) > 1:
            raise ValueError("one step can have average_bits")
        return self

    def rounds(self) -> list[RoundStep]:
        """The steps that round."""
        return [step for step in self.steps if isinstance(step, RoundStep)]

    @property
    def awq(self) -> AwqStep | None:
        """The step that scales in the manner of AWQ."""
        return next((step for step in self.steps if isinstance(step, AwqStep)), None)

    @property
    def smoothquant(self) -> SmoothQuantStep | None:
        """The step that scales in the manner of SmoothQuant."""
        return next((step for step in self.steps if isinstance(step, SmoothQuantStep)), None)

    @property
    def kv_cache(self) -> bool:
        """Whether scales of keys and values are wanted."""
        return isinstance(self.steps[-1], KVCacheStep)

    @property
    def calibrated(self) -> bool:
        """Whether any step needs to see the model at work."""
        return any(step.step != "round" for step in self.steps) or any(
            step.method == "gptq" or step.average_bits is not None for step in self.rounds()
        )

    def yaml(self) -> str:
        """The recipe as a file holds it, without what is left at its default."""
        import yaml

        steps = [{"step": step.step} | step.model_dump(exclude_defaults=True) for step in self.steps]
        return yaml.safe_dump({"steps": steps}, sort_keys=False)


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The names that any pattern is for, in their own order.

    A pattern is a word (``linears``, ``attention``, ``down``, ``head`` …) or has wildcards, as
    ``layers.0.*``. Raises ConfigError for a pattern that fits no name, with the nearest one.
    """
    found: set[str] = set()
    for pattern in patterns:
        these = fnmatch.filter(names, _WORDS.get(pattern, pattern))
        if not these and pattern != HEAD:
            raise ConfigError(
                f"No linear weight is called {pattern!r}: targets are {', '.join(_WORDS)}, or names such as "
                f"{names[0]} with wildcards{nearest(pattern, [*_WORDS, *names])}"
            )
        found.update(these)
    return [name for name in names if name in found]


_AWQ = {"step": "awq"}
_FITTED = {"step": "round", "group_size": 128, "fit": True}
_GPTQ = {"method": "gptq", "symmetric": False, "act_order": "static"}
_W8A8 = {"step": "round", "bits": 8, "group_size": -1, "input_activations": "dynamic-token"}
_BUILT_IN: dict[str, list[dict[str, Any]]] = {
    "rtn-int8": [_FITTED | {"bits": 8}],
    "rtn-int4": [_FITTED | {"symmetric": False}],
    "awq-int4": [_AWQ, _FITTED | {"symmetric": False}],
    "gptq-int4": [_FITTED | _GPTQ],
    "smoothquant-w8a8": [{"step": "smoothquant"}, _W8A8],
    "fp8": [_W8A8 | {"kind": "float8"}],
    "mixed-int4-int8": [_FITTED | _GPTQ | {"average_bits": 5.0}],
}
BUILT_IN = tuple(_BUILT_IN)
"""The names of the recipes that come along."""


def named_recipe(name: str) -> tuple[str, Recipe]:
    """A built-in recipe, or the one in a YAML file, and what to call it.

    Raises ConfigError with the line of what is wrong and the name that is nearest to a wrong one.
    """
    if name in _BUILT_IN:
        return name, Recipe.model_validate({"steps": _BUILT_IN[name]})
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"There is no recipe {name!r}: there are {', '.join(BUILT_IN)}, or name a YAML file"
            f"{nearest(name, BUILT_IN)}"
        )
    return path.stem, read_yaml(path, Recipe)
