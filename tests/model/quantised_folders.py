"""Quantised safetensors folders, packed by definition, with nothing of ours, and the floats they hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from headrace.model.weights.safetensors_file import SafetensorsFile

Array = NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Array, bits: int) -> Array:
    """``[rows, count]`` codes into int32 words along the rows, lowest bits first."""
    each = 32 // bits
    rows, count = codes.shape
    padded = np.zeros((rows, -(-count // each) * each), np.uint64)
    padded[:, :count] = codes
    out = np.zeros((rows, padded.shape[1] // each), np.uint64)
    for index in range(each):
        out |= padded[:, index::each] << np.uint64(bits * index)
    return out.astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Rounded:
    """A weight of known codes: ``dense`` is what every reader has to arrive at."""

    codes: Array  # uint8 [out, in]
    scale: Array  # [out, groups]
    zero: Array  # uint8 [out, groups]
    groups: Array  # int32 [in]
    bits: int

    @property
    def dense(self) -> Array:
        steps = self.codes.astype(np.float32) - self.zero.astype(np.float32)[:, self.groups]
        return steps * self.scale.astype(np.float32)[:, self.groups]

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def signed_zero(self) -> Array:
        return (self.zero.astype(np.int16) - self.middle).astype(np.int8)


def rounded(
    weight: Array,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    act_order: bool = False,
    scale_type: Any = np.float16,
    seed: int = 0,
) -> Rounded:
    """``weight`` rounded to nearest; act-order deals the inputs out to the groups at random."""
    out, inputs = weight.shape
    size = group_size or inputs
    groups = (np.arange(inputs) // size).astype(np.int32)
    if act_order:
        groups = np.random.default_rng(seed).permutation(groups)
    count = -(-inputs // size)
    top = (1 << bits) - 1
    scale = np.zeros((out, count), scale_type)
    zero = np.full((out, count), 1 << (bits - 1), np.uint8)
    codes = np.zeros(weight.shape, np.uint8)
    for group in range(count):
        part = weight[:, groups == group].astype(np.float32)
        if symmetric:
            step = np.abs(part).max(1) * 2 / top
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            step = (high - low) / top
        scale[:, group] = step
        held = scale[:, group].astype(np.float32)
        if not symmetric:
            zero[:, group] = np.clip(np.rint(-low / held), 0, top)
        base = zero[:, group].astype(np.float32)[:, None]
        codes[:, groups == group] = np.clip(np.rint(part / held[:, None]) + base, 0, top)
    return Rounded(codes, scale, zero, groups, bits)


Parts = dict[str, Array]


def gptq_parts(w: Rounded, *, less_one: bool, g_idx: bool = True) -> Parts:
    zero = w.zero.astype(np.int16) - int(less_one)
    parts = {
        "qweight": np.ascontiguousarray(words(w.codes, w.bits).T),
        "qzeros": words(np.ascontiguousarray(zero.T).astype(np.uint8), w.bits),
        "scales": np.ascontiguousarray(w.scale.T),
    }
    return parts | {"g_idx": w.groups} if g_idx else parts


def awq_parts(w: Rounded) -> Parts:
    def packed(values: Array) -> Array:
        eights = values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)]
        return words(np.ascontiguousarray(eights).reshape(values.shape), 4)

    return {
        "qweight": packed(np.ascontiguousarray(w.codes.T)),
        "qzeros": packed(np.ascontiguousarray(w.zero.T)),
        "scales": np.ascontiguousarray(w.scale.T),
    }


def packed_parts(w: Rounded, *, symmetric: bool, g_idx: bool = False) -> Parts:
    parts = {
        "weight_packed": words(w.codes, w.bits),
        "weight_scale": w.scale,
        "weight_shape": np.array(w.codes.shape, np.int64),
    }
    if not symmetric:
        zero = words(np.ascontiguousarray(w.zero.T), w.bits).T
        parts["weight_zero_point"] = np.ascontiguousarray(zero)
    return parts | {"weight_g_idx": w.groups} if g_idx else parts


def int8_parts(w: Rounded, *, symmetric: bool) -> Parts:
    codes = (w.codes.astype(np.int16) - 128).astype(np.int8)
    parts = {"weight": codes, "weight_scale": w.scale}
    return parts if symmetric else parts | {"weight_zero_point": w.signed_zero()}


def ct_config(form: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors with one group."""
    described = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": described, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Case:
    """A format: its ``quantization_config``, the parts of a weight, and the floats that they stand for."""

    config: dict[str, Any]
    make: Callable[[Array, int], tuple[Parts, Array]]  # of a weight and a seed


def _of(parts: Callable[[Rounded], Parts], **how: Any) -> Callable[[Array, int], tuple[Parts, Array]]:
    def make(weight: Array, seed: int) -> tuple[Parts, Array]:
        w = rounded(weight, seed=seed, **how)
        return parts(w), w.dense

    return make


def _float8(weight: Array, seed: int) -> tuple[Parts, Array]:
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    narrow = (weight / scale.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)
    dense = narrow.astype(np.float32) * scale.astype(np.float32)
    return {"weight": narrow, "weight_scale": scale}, dense


def _float8_per_tensor(weight: Array, seed: int) -> tuple[Parts, Array]:
    scale = np.array(np.abs(weight).max() / 448, np.float32)
    narrow = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": narrow, "weight_scale": scale.reshape(1)}, narrow.astype(np.float32) * scale


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | settings


_PACKED = "pack-quantized"
_GROUPS = {"strategy": "group", "group_size": 32}
CASES: dict[str, Case] = {
    "ct int4": Case(ct_config(_PACKED, **_GROUPS), _of(lambda w: packed_parts(w, symmetric=True))),
    "ct int4 zero points": Case(
        ct_config(_PACKED, **_GROUPS, symmetric=False),
        _of(lambda w: packed_parts(w, symmetric=False), symmetric=False),
    ),
    "ct int4 bf16 scales": Case(
        ct_config(_PACKED, **_GROUPS),
        _of(lambda w: packed_parts(w, symmetric=True), scale_type=ml_dtypes.bfloat16),
    ),
    "ct int4 act-order": Case(
        ct_config(_PACKED, **_GROUPS, actorder="group"),
        _of(lambda w: packed_parts(w, symmetric=True, g_idx=True), act_order=True),
    ),
    "ct int4 groups of 16": Case(
        ct_config(_PACKED, strategy="group", group_size=16),
        _of(lambda w: packed_parts(w, symmetric=True), group_size=16),
    ),
    "ct int4 channels": Case(
        ct_config(_PACKED, strategy="channel"),
        _of(lambda w: packed_parts(w, symmetric=True), group_size=None, scale_type=np.float32),
    ),
    "ct int8": Case(
        ct_config(_PACKED, **_GROUPS, num_bits=8), _of(lambda w: packed_parts(w, symmetric=True), bits=8)
    ),
    "ct int8 zero points": Case(
        ct_config(_PACKED, **_GROUPS, num_bits=8, symmetric=False),
        _of(lambda w: packed_parts(w, symmetric=False), bits=8, symmetric=False),
    ),
    "ct w8a8": Case(
        ct_config("int-quantized", num_bits=8, strategy="channel"),
        _of(lambda w: int8_parts(w, symmetric=True), bits=8, group_size=None, scale_type=np.float32),
    ),
    "ct w8a8 zero points": Case(
        ct_config("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        _of(lambda w: int8_parts(w, symmetric=False), bits=8, group_size=None, symmetric=False),
    ),
    "ct fp8": Case(ct_config("float-quantized", num_bits=8, type="float", strategy="channel"), _float8),
    "ct fp8 per tensor": Case(
        ct_config("float-quantized", num_bits=8, type="float", strategy="tensor"), _float8_per_tensor
    ),
    "gptq v1": Case(_gptq(), _of(lambda w: gptq_parts(w, less_one=True))),
    "gptq v1 without g_idx": Case(_gptq(), _of(lambda w: gptq_parts(w, less_one=True, g_idx=False))),
    "gptq v1 act-order": Case(
        _gptq(desc_act=True), _of(lambda w: gptq_parts(w, less_one=True), act_order=True)
    ),
    "gptq v2 zero points": Case(
        _gptq(checkpoint_format="gptq_v2", sym=False),
        _of(lambda w: gptq_parts(w, less_one=False), symmetric=False),
    ),
    "gptq v2 act-order, zero points": Case(
        _gptq(checkpoint_format="gptq_v2", sym=False, desc_act=True),
        _of(lambda w: gptq_parts(w, less_one=False), symmetric=False, act_order=True),
    ),
    "gptq 8 bits": Case(_gptq(bits=8), _of(lambda w: gptq_parts(w, less_one=True), bits=8)),
    "gptq 2 bits": Case(_gptq(bits=2), _of(lambda w: gptq_parts(w, less_one=True), bits=2)),
    "gptq one group": Case(
        _gptq(group_size=-1), _of(lambda w: gptq_parts(w, less_one=True), group_size=None)
    ),
    "gptq ragged groups": Case(
        _gptq(group_size=96), _of(lambda w: gptq_parts(w, less_one=True, g_idx=False), group_size=96)
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _of(awq_parts, symmetric=False),
    ),
    "awq one group": Case(
        {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "GEMM"},
        _of(awq_parts, symmetric=False, group_size=None),
    ),
}


def load(path: Path) -> dict[str, Array]:
    """All tensors of a file; the safetensors library knows no float8 in numpy."""
    file = SafetensorsFile(path)
    return {
        name: file.read(name).view(ml_dtypes.float8_e4m3fn) if entry.dtype == "F8_E4M3" else file.read(name)
        for name, entry in file.entries.items()
    }


def write_folder(source: Path, folder: Path, case: Case) -> dict[str, Array]:
    """``source``'s checkpoint with its linears in the case's format; their floats by Hugging Face name."""
    shutil.copytree(source, folder)
    tensors: dict[str, Array] = safetensors.numpy.load_file(source / "model.safetensors")
    floats: dict[str, Array] = {}
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        # quantisers give q, k and v, which see the same inputs, the same order; here v has another
        seed = 7 if "v_proj" in name else int(name.split(".")[2])
        parts, floats[name] = case.make(tensors.pop(name), seed)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": case.config}))
    return floats
