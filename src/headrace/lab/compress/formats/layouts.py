"""Rounded weights as tensors of a Transformers folder, and the ``quantization_config`` that tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.format_names import Layout
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model.weights.int32_codes import pack, pack_awq

Parts = dict[str, NDArray[Any]]
"""Tensors by the last part of their names."""

_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def check_layout(layout: Layout, name: str, scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raise ConfigError, with ``name``, if the layout cannot hold a weight ``(out, in)`` of this scheme."""
    if layout == "compressed-tensors":
        return
    (out, inputs), bits = shape, scheme.bits
    if scheme.kind != "int":
        raise ConfigError(f"{name}: {layout} holds integers, and this is float8: write compressed-tensors.")
    if layout == "awq":
        if bits != 4:
            raise ConfigError(f"{name}: awq holds 4-bit integers: write gptq or compressed-tensors.")
        if scheme.act_order == "group":
            raise ConfigError(f"{name}: awq has no place for act-order's groups: write gptq.")
        if out % 8:
            raise ConfigError(f"{name}: awq packs eight outputs to a word, and there are {out}.")
        return
    for width, what in ((out, "outputs"), (inputs, "inputs")):
        if width * bits % 32:
            raise ConfigError(f"{name}: {layout} packs {32 // bits} {what} to a word, and there are {width}.")


def parts_of(layout: Layout, name: str, linear: QuantizedLinear) -> Parts:
    """The tensors of one weight. Raises ConfigError, with ``name``, for what the layout cannot hold."""
    check_layout(layout, name, linear.scheme, linear.shape)
    if layout == "awq":
        return _awq(name, linear)
    if layout == "compressed-tensors":
        return _compressed(linear)
    return _gptq(name, linear, v1=is_v1(layout, linear.scheme))


def is_v1(layout: Layout, scheme: Scheme) -> bool:
    """Whether zero points are stored less one, which everybody reads. Only the middle one survives that in
    all readers, so weights with zero points are written as v2."""
    return layout == "gptq" and scheme.symmetric


def quantization_config(
    layout: Layout, schemes: Mapping[str, Scheme], plain: list[str], *, kv_scales: bool = False
) -> dict[str, Any]:
    """What ``config.json`` says. ``schemes``: by module name; ``plain``: linears that stay floats;
    ``kv_scales``: there are scales of keys and values.

    Raises ConfigError where the layout needs one scheme for all, and there are several, and where it has no
    place for scales of keys and values.
    """
    if layout == "compressed-tensors":
        return _compressed_config(schemes, plain) | {"kv_cache_scheme": _KV_CACHE if kv_scales else None}
    if kv_scales:
        raise no_kv_scales(layout)
    several = {_stored(scheme) for scheme in schemes.values()}
    if len(several) != 1:
        raise ConfigError(
            f"{layout} holds one number of bits and one group size for all weights, and these have several: "
            "write compressed-tensors, or change the recipe."
        )
    (scheme,) = several
    group_size = scheme.group_size or -1
    if layout == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
        skipped = [name for name in plain if name != "lm_head"]
        return config | {"version": "gemm", "modules_to_not_convert": skipped or None}
    kept = [name for name in plain if name != "lm_head"]
    if kept:
        raise ConfigError(
            f"{layout} rounds every linear of the layers, and {kept[0]} (of {len(kept)}) is kept as floats: "
            "write compressed-tensors, or change the recipe."
        )
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": group_size,
        "desc_act": any(each.act_order == "group" for each in schemes.values()),
        "sym": scheme.symmetric,
        "lm_head": "lm_head" in schemes,
        "checkpoint_format": "gptq" if is_v1(layout, scheme) else "gptq_v2",
        "pack_dtype": "int32",
    }


def no_kv_scales(form: str) -> ConfigError:
    """An error for the caller to raise: the format has no place for scales of keys and values."""
    return ConfigError(
        f"{form} has no place for the scales of keys and values: write compressed-tensors, or take the step "
        "kv_cache out of the recipe."
    )


def compression(scheme: Scheme) -> str:
    """compressed-tensors' name of how a scheme is stored."""
    if scheme.kind == "float8":
        return "float-quantized"
    whole_bytes = scheme.bits == 8 and scheme.input_activations and scheme.act_order != "group"
    return "int-quantized" if whole_bytes else "pack-quantized"


def _stored(scheme: Scheme) -> Scheme:
    """Of a scheme what a GPTQ or AWQ file says."""
    return replace(scheme, input_activations=None, act_order=None)


def _compressed(linear: QuantizedLinear) -> Parts:
    kind, bits = compression(linear.scheme), linear.scheme.bits
    if kind == "float-quantized":
        return {"weight": linear.codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": linear.scale}
    if kind == "int-quantized":
        parts: Parts = {"weight": _signed(linear.codes), "weight_scale": linear.scale}
        return parts if linear.zero is None else parts | {"weight_zero_point": _signed(linear.zero)}
    parts = {
        "weight_packed": pack(linear.codes, bits),
        "weight_scale": linear.scale,
        "weight_shape": np.array(linear.shape, np.int64),
    }
    if linear.zero is not None:
        parts["weight_zero_point"] = np.ascontiguousarray(pack(linear.zero.T, bits).T)
    if linear.g_idx is not None:
        parts["weight_g_idx"] = linear.g_idx
    return parts


def _signed(codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    return (codes ^ np.uint8(0x80)).view(np.int8)


def _gptq(name: str, linear: QuantizedLinear, *, v1: bool) -> Parts:
    bits = linear.scheme.bits
    scale = _half(name, linear)
    middle = np.full(scale.shape, 1 << (bits - 1), np.uint8)
    zero = middle if linear.zero is None else linear.zero
    if v1:
        zero = zero - np.uint8(1)
    return {
        "qweight": np.ascontiguousarray(pack(linear.codes, bits).T),
        "qzeros": pack(np.ascontiguousarray(zero.T), bits),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": linear.groups().astype(np.int32),
    }


def _awq(name: str, linear: QuantizedLinear) -> Parts:
    scale = _half(name, linear)
    zero = np.full(scale.shape, 8, np.uint8) if linear.zero is None else linear.zero
    return {
        "qweight": pack_awq(np.ascontiguousarray(linear.codes.T)),
        "qzeros": pack_awq(np.ascontiguousarray(zero.T)),
        "scales": np.ascontiguousarray(scale.T),
    }


def _half(name: str, linear: QuantizedLinear) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = linear.scale.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), linear.scale.astype(np.float32)):
        raise ConfigError(
            f"{name}: its scales need float32, and this format has float16: write compressed-tensors."
        )
    return half


def _compressed_config(schemes: Mapping[str, Scheme], plain: list[str]) -> dict[str, Any]:
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    formats = list(dict.fromkeys(compression(scheme) for scheme in groups))
    described = {}
    for number, (scheme, names) in enumerate(groups.items()):
        targets = ["Linear"] if len(groups) == 1 else names
        described[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(scheme),
            "input_activations": _activations(scheme),
            "output_activations": None,
            "format": compression(scheme),
        }
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": plain,
        "config_groups": described,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "float8" else "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "dynamic": False,
    }
    if scheme.group_size is not None:
        weights["group_size"] = scheme.group_size
    if scheme.act_order is not None:
        weights["actorder"] = scheme.act_order
    return weights


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.input_activations is None:
        return None
    kind = "float" if scheme.kind == "float8" else "int"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
