"""compressed-tensors checkpoints: pack-, int-, float- and naive-quantized weights.

Which layers are quantised, and into what, follows from their tensors; the configuration has to agree. So
names and patterns of the configuration, which may be anything, are never interpreted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.hf_keys import Keys
from headrace.model.weights.int32_codes import WIDTHS, unpack, words_for
from headrace.model.weights.quantized_linear import (
    FLOATS,
    INTEGERS,
    Module,
    assemble,
    group_count,
    read_groups,
)

_log = logging.getLogger(__name__)

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
_FLOAT8_NAN = 0x7F  # of e4m3 without its sign
_MAX_GROUP = 1 << 24


@dataclass(frozen=True, slots=True)
class _Weights:
    """What one of the configuration's groups says about weights; ``group_size`` None: one scale an output."""

    bits: int
    type: Literal["int", "float"]
    symmetric: bool
    group_size: int | None
    per_tensor: bool

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else group_count(inputs, self.group_size)


class CompressedTensors:
    """``weight_packed``, or ``weight`` as int8 or float8 e4m3, with ``weight_scale`` and the like."""

    # Activations, keys and values are quantised while running, finer than any scale that was fixed before.
    # That scales of keys and values are not used is told, because they may be what the file was made for.
    ignored = frozenset(
        [f"{what}_{kind}" for what in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")]
    )

    def __init__(self, keys: Keys) -> None:
        _check_format(keys)
        status = keys.text("quantization_status", "compressed")
        if status != "compressed":
            raise keys.wrong("quantization_status", f"is {status!r}; only compressed weights are read")
        if keys.has("sparsity_config") and keys.section("sparsity_config").text("format", "dense") != "dense":
            raise keys.wrong("sparsity_config", "asks for another format than dense, which is not supported")
        if keys.has("kv_cache_scheme") and keys.section("kv_cache_scheme").names():
            _log.warning(
                "the checkpoint has scales for keys and values (kv_cache_scheme), which are not used: these "
                "are kept in bfloat16, or with --kv-cache-dtype int8 with a scale for every token and head"
            )
        if keys.has("transform_config") and keys.section("transform_config").names():
            raise keys.wrong("transform_config", "asks for transforms inside the network: not supported")
        groups = keys.section("config_groups")
        self._declared: list[_Weights] = []
        for name in groups.names():
            group = groups.section(name)
            if group.has("format"):
                _check_format(group)
            if group.has("weights"):
                self._declared.append(_weights(group.section("weights")))
        if not self._declared:
            raise keys.wrong("config_groups", "says nothing about weights")

    def check(self, module: Module) -> tuple[str, ...]:
        if "weight_packed" in module.parts:
            return self._check_packed(module)
        if "weight" in module.parts and module.entry("weight").dtype in ("I8", "F8_E4M3"):
            return self._check_bytes(module)
        return ()

    def read(self, module: Module) -> QuantTensor:
        if "weight_packed" in module.parts:
            return self._read_packed(module)
        return self._read_bytes(module)

    def _check_packed(self, module: Module) -> tuple[str, ...]:
        out, inputs = module.shape
        bits = self._packed_bits(module)
        groups = self._declaration(module, "int", bits).groups(inputs)
        parts = ["weight_packed", "weight_scale"]
        module.expect("weight_packed", ("I32",), (out, words_for(inputs, bits)))
        module.expect("weight_scale", FLOATS, (out, groups))
        if "weight_zero_point" in module.parts:
            module.expect("weight_zero_point", ("I32",), (words_for(out, bits), groups))
            parts.append("weight_zero_point")
        if "weight_shape" in module.parts:
            module.expect("weight_shape", INTEGERS, (2,))
            if tuple(module.read("weight_shape").tolist()) != module.shape:
                raise module.wrong(
                    "weight_shape", f"is not [{out}, {inputs}], as config.json makes the layer"
                )
            parts.append("weight_shape")
        if "weight_g_idx" in module.parts:
            module.expect("weight_g_idx", INTEGERS, (inputs,))
            parts.append("weight_g_idx")
        return tuple(parts)

    def _check_bytes(self, module: Module) -> tuple[str, ...]:
        found = module.entry("weight")
        if found.shape != module.shape:
            raise module.wrong(
                "weight", f"is {list(found.shape)}, but config.json makes it {list(module.shape)}"
            )
        kind: Literal["int", "float"] = "int" if found.dtype == "I8" else "float"
        groups = self._declaration(module, kind, 8).groups(module.shape[1])
        scale = module.entry("weight_scale")
        module.expect("weight_scale", FLOATS, scale.shape)
        if kind == "float" and groups != 1:
            raise module.wrong("weight_scale", "is of groups, but float8 weights have one scale an output")
        if "weight_zero_point" not in module.parts:
            return ("weight", "weight_scale")
        module.expect("weight_zero_point", ("I8",), scale.shape)
        return ("weight", "weight_scale", "weight_zero_point")

    def _packed_bits(self, module: Module) -> int:
        """The declared width that the number of words goes with."""
        out, inputs = module.shape
        widths = [
            weights.bits for weights in self._declared if weights.type == "int" and weights.bits in WIDTHS
        ]
        for bits in widths:
            if module.entry("weight_packed").shape == (out, words_for(inputs, bits)):
                return bits
        wanted = " or ".join(str([out, words_for(inputs, bits)]) for bits in dict.fromkeys(widths))
        raise module.wrong(
            "weight_packed",
            f"is {list(module.entry('weight_packed').shape)}, where config_groups call for "
            f"{wanted or 'none'} in a layer of [{out}, {inputs}]",
        )

    def _declaration(self, module: Module, kind: Literal["int", "float"], bits: int) -> _Weights:
        """The group of the configuration that goes with the tensors that there are."""
        out, inputs = module.shape
        shape = module.entry("weight_scale").shape
        symmetric = "weight_zero_point" not in module.parts
        for weights in self._declared:
            if (weights.type, weights.bits, weights.symmetric) != (kind, bits, symmetric):
                continue
            groups = weights.groups(inputs)
            if weights.per_tensor and shape in ((), (1,), (1, 1)):
                return weights
            if shape == (out, groups) or (groups == 1 and shape == (out,)):
                return weights
        zeros = "without zero points" if symmetric else "with zero points"
        raise module.wrong(
            "weight_scale",
            f"is {list(shape)}: none of config_groups makes that of {kind}{bits} weights of "
            f"[{out}, {inputs}] {zeros}",
        )

    def _read_packed(self, module: Module) -> QuantTensor:
        out, inputs = module.shape
        bits = self._packed_bits(module)
        scale = module.read("weight_scale")
        zero: NDArray[np.uint8] | int = 1 << (bits - 1)
        if "weight_zero_point" in module.parts:
            zero = unpack(module.read("weight_zero_point").T, bits, out).T
        return assemble(
            module,
            unpack(module.read("weight_packed"), bits, inputs),
            scale,
            bits=bits,
            zero=zero,
            group_size=self._declaration(module, "int", bits).group_size or inputs,
            groups=read_groups(module, "weight_g_idx"),
            scale_part="weight_scale",
        )

    def _read_bytes(self, module: Module) -> QuantTensor:
        out, inputs = module.shape
        codes = module.read("weight")
        float8 = module.entry("weight").dtype != "I8"
        scale = _by_row(module.read("weight_scale"), out)
        if float8:
            if ((codes & np.uint8(_FLOAT8_NAN)) == _FLOAT8_NAN).any():
                raise module.wrong("weight", "holds NaN")
            zero: NDArray[np.uint8] | int = 0
        else:
            codes, zero = codes.view(np.uint8) ^ np.uint8(0x80), 128  # signed byte + 128
            if "weight_zero_point" in module.parts:
                signed = np.ascontiguousarray(_by_row(module.read("weight_zero_point"), out))
                zero = signed.view(np.uint8) ^ np.uint8(0x80)
        return assemble(
            module,
            codes,
            scale,
            bits=8,
            zero=zero,
            group_size=self._declaration(module, "float" if float8 else "int", 8).group_size or inputs,
            scale_part="weight_scale",
            float8=float8,
        )


def _check_format(keys: Keys) -> None:
    name = keys.text("format", "dense")
    if name not in _FORMATS:
        raise keys.wrong("format", f"is {name!r}, which is not supported; it must be {', '.join(_FORMATS)}")


def _weights(keys: Keys) -> _Weights:
    kind = keys.text("type", "int")
    if kind not in ("int", "float"):
        raise keys.wrong("type", f"is {kind!r}; it must be int or float")
    bits = keys.integer("num_bits", 8, high=64)
    if kind == "float" and bits != 8:
        raise keys.wrong("num_bits", f"is {bits}; floats of 8 bits are supported")
    if bits not in WIDTHS:
        raise keys.wrong("num_bits", f"is {bits}; 2, 4 and 8 are supported")
    grouped = keys.has("group_size") and keys.integer("group_size", low=-1, high=_MAX_GROUP) > 0
    strategy = keys.text("strategy", "group" if grouped else "tensor")
    if strategy not in ("tensor", "channel", "group"):
        raise keys.wrong("strategy", f"is {strategy!r}; tensor, channel and group are supported")
    if strategy == "group" and not grouped:
        raise keys.wrong("group_size", "must be positive where 'strategy' is group")
    return _Weights(
        bits,
        "int" if kind == "int" else "float",
        keys.flag("symmetric", True),
        keys.integer("group_size", high=_MAX_GROUP) if strategy == "group" else None,
        strategy == "tensor",
    )


def _by_row(values: NDArray[np.generic], out: int) -> NDArray[np.generic]:
    """Scales or zero points ``[out, groups]``; those of a whole tensor once for each row."""
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (out, 1))
    return values.reshape(out, -1)
