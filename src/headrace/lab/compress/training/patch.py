"""Tensors of a folder written over in a copy of it: whatever is not changed keeps its bytes, and its size."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.format_names import Layout
from headrace.lab.compress.formats.layouts import parts_of
from headrace.lab.compress.quantized import QuantizedLinear
from headrace.lab.compress.report import JSON_NAME, PAGE_NAME
from headrace.model.weights.json_file import read_json
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.safetensors_file import Entry, SafetensorsFile

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_SCALES = {"weight_scale", "scales"}
_CODES = {"weight", "weight_packed", "qweight"}
Changed = Mapping[str, QuantizedLinear | NDArray[np.float32]]


def write_over(
    checkpoint: SafetensorsCheckpoint, changed: Changed, draft: Path, *, codes: bool = False
) -> None:
    """Copy the checkpoint's folder into ``draft``, and there put ``changed`` in place of what it was:
    norms and scales, and with ``codes`` these, too.

    Reports on the model as it was stay behind. Raises ConfigError for a tensor that does not fit its place.
    """
    layout = _layout(checkpoint)
    for path in sorted(checkpoint.path.iterdir()):
        if path.is_file() and path.name not in (JSON_NAME, PAGE_NAME):
            shutil.copyfile(path, draft / path.name)
    for name, tensor in changed.items():
        places = checkpoint.places(name)
        if isinstance(tensor, QuantizedLinear):
            kept = "weight" in places and tensor.scheme.kind == "int"  # whole bytes
            scheme = replace(tensor.scheme, input_activations="dynamic-token") if kept else tensor.scheme
            parts = parts_of(layout, name, replace(tensor, scheme=scheme))
            wanted = _SCALES | _CODES if codes else _SCALES
        else:
            one = float(checkpoint.architecture.family == "gemma3" and "norm" in name)
            parts = {"weight": tensor - np.float32(one)}
            wanted = {"weight"}
        for part, array in parts.items():
            if part in wanted:
                _put(draft, name, *places[part], array)


def _put(draft: Path, name: str, file: SafetensorsFile, entry: Entry, array: NDArray[Any]) -> None:
    wanted = _DTYPES.get(entry.dtype)
    if wanted is None or not _fits(array, entry, wanted):
        raise ConfigError(
            f"{name} is {entry.dtype} {list(entry.shape)} in {file.path.name}, and was trained as "
            f"{array.dtype} {list(array.shape)}: such a folder cannot be repaired."
        )
    content = np.ascontiguousarray(array.astype(wanted)).reshape(-1).view(np.uint8)
    with (draft / file.path.name).open("r+b") as out:
        out.seek(entry.start)
        out.write(content.data)


def _fits(array: NDArray[Any], entry: Entry, wanted: np.dtype[Any]) -> bool:
    """Shape and kind; a scale may have an axis that is one long, or lack it."""
    floats = {"F32", "F16", "BF16"}
    kind = array.dtype == wanted or (entry.dtype in floats and array.dtype in (np.float32, np.float16))
    shape = [size for size in entry.shape if size != 1]
    return kind and shape == [size for size in array.shape if size != 1]


def _layout(checkpoint: SafetensorsCheckpoint) -> Layout:
    config = read_json(checkpoint.path / "config.json").get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "gptq":
        return "gptq-v2"  # zero points stay as they are: only they differ between the versions
    if method == "awq":
        return "awq"
    return "compressed-tensors"
