"""A recipe: ordered steps, each with the tensors it is for and its settings; built in, or a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import ConfigError
from headrace.lab.compress.prune_steps import DepthBy, DepthStep, PruneStep, SearchStep, WidthStep
from headrace.lab.compress.quantized import Activations, ActOrder, Kind, Scheme
from headrace.lab.compress.targets import Targeted
from headrace.yaml_file import nearest, read_yaml


class AwqStep(Targeted):
    """Scales channels so that those which see large inputs lose less (AWQ, arXiv 2306.00978).

    ``grid`` exponents from 0 on are tried; ``clip`` also searches how far each group's range may shrink.
    """

    step: Literal["awq"]
    grid: int = Field(default=20, ge=2, le=200)
    clip: bool = True


class SmoothQuantStep(Targeted):
    """Moves the range of inputs into the weights that they meet (SmoothQuant, arXiv 2211.10438).

    ``alpha``: how much of it; by default what is found best for each input by a search.
    """

    step: Literal["smoothquant"]
    alpha: float | None = Field(default=None, ge=0, le=1)


class RoundStep(Targeted):
    """Rounds weights: to the nearest code, or one input after the other with errors made up for by those
    that follow (``gptq``, arXiv 2210.17323).

    ``group_size`` -1: one scale per output. ``fit``: where it does not divide the inputs of all targets, take
    the largest divisor of it that does. ``average_bits``: ``bits`` is the least, and the layers that suffer
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


Step = Annotated[
    DepthStep | WidthStep | SearchStep | AwqStep | SmoothQuantStep | PruneStep | RoundStep | KVCacheStep,
    Field(discriminator="step"),
]
_STAGES = (("depth", "width", "search"), ("awq", "smoothquant"), ("prune",), ("round",), ("kv_cache",))
_STAGE = {kind: place for place, kinds in enumerate(_STAGES) for kind in kinds}


class Recipe(BaseModel):
    """Steps in their order: those that change the shape, that scale channels, that prune, that round, and the
    one for the KV cache."""

    model_config = ConfigDict(extra="forbid")

    steps: list[Step] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> Recipe:
        kinds: list[str] = [step.step for step in self.steps]
        if "round" not in kinds and {"awq", "smoothquant", "kv_cache"} & set(kinds):
            raise ValueError("no step rounds anything: add one with step: round")
        if "kv_cache" in kinds[:-1]:
            raise ValueError("kv_cache is the last step, and there is one at most")
        if sorted(kinds, key=_STAGE.__getitem__) != kinds:
            raise ValueError(
                "depth, width and search come first; steps that scale channels (awq, smoothquant) come "
                "before prune, and all of these come before those that round"
            )
        for word in (*_STAGES[0], *_STAGES[1]):
            if kinds.count(word) > 1:
                raise ValueError(f"{word} can be a step once")
        if "search" in kinds and len(kinds) > 1:
            raise ValueError("search is a step by itself: what it finds is a model for other recipes")
        if sum(step.average_bits is not None for step in self.rounds()) > 1:
            raise ValueError("one step can have average_bits")
        return self

    def rounds(self) -> list[RoundStep]:
        """The steps that round."""
        return [step for step in self.steps if isinstance(step, RoundStep)]

    def prunes(self) -> list[PruneStep]:
        """The steps that make single weights zero."""
        return [step for step in self.steps if isinstance(step, PruneStep)]

    @property
    def depth(self) -> DepthStep | None:
        """The step that leaves layers out."""
        return next((step for step in self.steps if isinstance(step, DepthStep)), None)

    @property
    def width(self) -> WidthStep | None:
        """The step that leaves channels, heads or features out."""
        return next((step for step in self.steps if isinstance(step, WidthStep)), None)

    @property
    def search(self) -> SearchStep | None:
        """The step that looks for a shape."""
        return next((step for step in self.steps if isinstance(step, SearchStep)), None)

    @property
    def reshapes(self) -> bool:
        """Whether the model gets another shape."""
        return any(step is not None for step in (self.depth, self.width, self.search))

    @property
    def depth_by(self) -> DepthBy:
        """How layers are chosen."""
        chosen = self.depth or self.search
        return "influence" if chosen is None else chosen.by

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
        return (
            any(step.step not in ("prune", "round") for step in self.steps)
            or any(step.method != "magnitude" for step in self.prunes())
            or any(step.method == "gptq" or step.average_bits is not None for step in self.rounds())
        )

    def yaml(self) -> str:
        """The recipe as a file holds it, without what is left at its default."""
        import yaml

        steps = [{"step": step.step} | step.model_dump(exclude_defaults=True) for step in self.steps]
        return yaml.safe_dump({"steps": steps}, sort_keys=False)


_AWQ = {"step": "awq"}
_FITTED = {"step": "round", "group_size": 128, "fit": True}
_GPTQ = {"method": "gptq", "symmetric": False, "act_order": "static"}
_W8A8 = {"step": "round", "bits": 8, "group_size": -1, "input_activations": "dynamic-token"}
_BUILT_IN: dict[str, list[dict[str, Any]]] = {
    "rtn-int8": [_FITTED | {"bits": 8}],
    "rtn-int4": [_FITTED | {"symmetric": False}],
    "awq-int4": [_AWQ, _FITTED | {"symmetric": False}],
    "gptq-int4": [_FITTED | _GPTQ],
    "gptq-int8": [_FITTED | _GPTQ | {"bits": 8, "symmetric": True}],
    "smoothquant-w8a8": [{"step": "smoothquant"}, _W8A8 | {"method": "gptq"}],
    "fp8": [_W8A8 | {"kind": "float8"}],
    "mixed-int4-int8": [_FITTED | _GPTQ | {"average_bits": 5.0}],
}
_PRUNING: dict[str, list[dict[str, Any]]] = {
    "magnitude-50": [{"step": "prune", "method": "magnitude", "sparsity": 0.5}],
    "wanda-50": [{"step": "prune", "method": "wanda", "sparsity": 0.5}],
    "wanda-2-4": [{"step": "prune", "method": "wanda", "pattern": "2:4"}],
    "sparsegpt-50": [{"step": "prune", "method": "sparsegpt", "sparsity": 0.5}],
    "sparsegpt-2-4": [{"step": "prune", "method": "sparsegpt", "pattern": "2:4"}],
    "sparsegpt-50-int4": [
        {"step": "prune", "method": "sparsegpt", "sparsity": 0.5},
        _FITTED | {"method": "gptq", "symmetric": False},
    ],
    "depth-70": [{"step": "depth", "keep": 0.7}],
    "width-70": [{"step": "width", "feed_forward": 0.7, "heads": 0.7}],
    "search-70": [{"step": "search", "parameters": 0.7}],
}
BUILT_IN = tuple(_BUILT_IN)
"""The names of the recipes that come along for ``compress quantize``."""
PRUNING = tuple(_PRUNING)
"""Those for ``compress prune``."""


def named_recipe(name: str) -> tuple[str, Recipe]:
    """A built-in recipe, or the one in a YAML file, and what to call it.

    Raises ConfigError with the line of what is wrong and the name that is nearest to a wrong one.
    """
    built_in = _BUILT_IN | _PRUNING
    if name in built_in:
        return name, Recipe.model_validate({"steps": built_in[name]})
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"There is no recipe {name!r}: there are {', '.join(built_in)}, or name a YAML file"
            f"{nearest(name, built_in)}"
        )
    return path.stem, read_yaml(path, Recipe)
