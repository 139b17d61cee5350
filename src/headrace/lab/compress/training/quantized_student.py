"""A quantised model whose scales and norms are trained, and by choice its codes: its size stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend.torch.device import to_torch
from headrace.errors import ConfigError
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.convert import as_linear
from headrace.lab.compress.quantized import FLOAT8, QuantizedLinear
from headrace.model.architecture import Architecture
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.safetensors import SafetensorsCheckpoint

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_CODE_RATE = 5.0  # codes move in steps of one, scales in shares of themselves
_EDGE = 0.49  # of a step: how far from its code a weight begins, at most


def straight_through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """``rounded``, with the gradient of ``x`` (Bengio, Léonard, Courville, arXiv 1308.3432)."""
    return x + (rounded - x).detach()


@dataclass(frozen=True, slots=True, eq=False)
class _Rounded:
    """A weight in codes. ``scale``: ``[out, groups]`` float32 as stored in ``dtype``; ``zero``: per group."""

    linear: QuantizedLinear
    steps: torch.Tensor  # int16 [out, in]: codes less their zero points, or float8
    scale: torch.Tensor
    dtype: torch.dtype


@dataclass(eq=False)
class QuantizedStudent:
    """Opened from a folder. Parameters are relative changes: of a scale or norm, by which share it grows;
    with ``codes``, of a weight, by how many codes it moves. Weights begin where the teacher has them between
    two codes, if ``teacher`` is given and has the same shapes: those at an edge move first.

    Weights are always those that the file would hold: scales and norms rounded to its types, codes to
    integers, with the gradients of what was rounded passed straight through. Raises ConfigError for a folder
    that holds nothing quantised, or weights with minimums in floats.
    """

    checkpoint: SafetensorsCheckpoint
    codes: bool = False
    teacher: Weights | None = None
    architecture: Architecture = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.architecture = self.checkpoint.architecture
        self.parameters = {}
        self._rounded: dict[str, _Rounded] = {}
        self._floats: Weights = {}
        for name in self.checkpoint.names():
            tensor = self.checkpoint.tensor(name)
            if isinstance(tensor, QuantTensor):
                self._take(name, tensor)
                continue
            self._floats[name] = to_torch(tensor, torch.float32, torch.device("cpu"))
            if "norm" in name:
                self.parameters[name] = torch.zeros_like(self._floats[name]).requires_grad_()
        if not self._rounded:
            raise ConfigError(
                f"{self.checkpoint.path} holds no quantised weights: there is nothing to repair."
            )

    def weights(self) -> Weights:
        """See Student."""
        found = {name: self._float(name) for name in self._floats}
        return found | {name: self._matrix(name) for name in self._rounded}

    def rate(self, name: str) -> float:
        """See Student."""
        return _CODE_RATE if name.endswith("#codes") else 1.0

    def round(self) -> None:
        """See Student: the weights are always as the file holds them."""

    def changed(self) -> dict[str, QuantizedLinear | NDArray[np.float32]]:
        """The tensors that training may have changed, by canonical name."""
        with torch.no_grad():
            found: dict[str, QuantizedLinear | NDArray[np.float32]] = {
                name: self._float(name).numpy() for name in self._floats if name in self.parameters
            }
            for name, rounded in self._rounded.items():
                scale = self._scale(name).numpy()
                codes = rounded.linear.codes
                if self.codes:
                    codes = self._codes(name).numpy().astype(np.uint8)
                found[name] = replace(rounded.linear, codes=codes, scale=scale)
        return found

    def _take(self, name: str, tensor: QuantTensor) -> None:
        linear = as_linear(tensor)
        if linear is None:
            raise ConfigError(
                f"{name} of {self.checkpoint.path} has groups with minimums in floats, which repair cannot "
                "train: compress the model to compressed-tensors, gptq or awq."
            )
        if linear.scheme.kind == "float8" and self.codes:
            raise ConfigError(f"{name} is float8: --weights moves codes of integers; leave it out.")
        places = self.checkpoint.places(name)
        dtype = _DTYPES[places["weight_scale" if "weight_scale" in places else "scales"][1].dtype]
        self._rounded[name] = _Rounded(
            linear, _steps(linear), torch.from_numpy(linear.scale.astype(np.float32)), dtype
        )
        self.parameters[f"{name}#scale"] = torch.zeros(linear.scale.shape).requires_grad_()
        if self.codes:
            self.parameters[f"{name}#codes"] = self._beginning(name).requires_grad_()

    def _beginning(self, name: str) -> torch.Tensor:
        """How far each weight is from its code, in steps.

        Recipes may have scaled the channels of inputs and outputs: the teacher's are brought to the same.
        """
        linear = self._rounded[name].linear
        exact = None if self.teacher is None else self.teacher.get(name)
        if exact is None or exact.shape != linear.codes.shape:
            return torch.zeros(linear.codes.shape)
        kept = torch.from_numpy(linear.dequantize())
        for axis in (0, 1):
            exact = exact * ((kept * exact).sum(axis, True) / exact.square().sum(axis, True).clamp_min(1e-30))
        scale = self._rounded[name].scale[:, torch.from_numpy(linear.groups()).long()]
        apart = torch.where(scale == 0, 0.0, (exact - kept) / torch.where(scale == 0, 1.0, scale))
        return apart.clamp(-_EDGE, _EDGE)

    def _float(self, name: str) -> torch.Tensor:
        kept = self._floats[name]
        if name not in self.parameters:
            return kept
        grown = kept * (1 + self.parameters[name])
        one = float(self.architecture.family == "gemma3")  # its files hold norms without it
        dtype = _DTYPES[str(self.checkpoint.stored_as(name)[0])]
        return straight_through(grown, (grown - one).to(dtype).float() + one)

    def _scale(self, name: str) -> torch.Tensor:
        rounded = self._rounded[name]
        grown = rounded.scale * (1 + self.parameters[f"{name}#scale"])
        return straight_through(grown, grown.to(rounded.dtype).float())

    def _codes(self, name: str) -> torch.Tensor:
        linear = self._rounded[name].linear
        moved = torch.from_numpy(linear.codes).float() + self.parameters[f"{name}#codes"]
        return straight_through(moved, moved.round().clamp(0, (1 << linear.scheme.bits) - 1))

    def _matrix(self, name: str) -> torch.Tensor:
        rounded = self._rounded[name]
        linear, scale = rounded.linear, self._scale(name)
        if self.codes:
            steps = self._codes(name) - _zero(linear)
        else:
            steps = rounded.steps.float()
        if linear.g_idx is not None:
            return steps * scale[:, torch.from_numpy(linear.groups()).long()]
        out, inputs = linear.shape
        return (steps.view(out, -1, inputs // scale.shape[1]) * scale[:, :, None]).view(out, inputs)


def _zero(linear: QuantizedLinear) -> torch.Tensor:
    """The zero point of every weight, or one for all."""
    if linear.zero is None:
        return torch.tensor(float(1 << (linear.scheme.bits - 1)))
    return torch.from_numpy(linear.zero.astype(np.float32))[:, torch.from_numpy(linear.groups()).long()]


def _steps(linear: QuantizedLinear) -> torch.Tensor:
    """What scales multiply, in a narrow type."""
    if linear.scheme.kind == "float8":
        values: NDArray[Any] = linear.codes.view(FLOAT8).astype(np.float32)
        return torch.from_numpy(values).bfloat16()  # exact: float8 has fewer bits
    return (torch.from_numpy(linear.codes).float() - _zero(linear)).to(torch.int16)
