"""Writing a compressed model in a format that other programs load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.formats.config_json import config_of
from headrace.lab.compress.formats.gguf_blocks import (
    Encoded,
    encode_dense,
    encode_embedding,
    encode_linear,
)
from headrace.lab.compress.formats.gguf_file import GGUFWriter
from headrace.lab.compress.formats.gguf_metadata import architecture_metadata, rope_factors
from headrace.lab.compress.formats.gguf_tokens import tokenizer_metadata
from headrace.lab.compress.formats.layouts import Layout, parts_of, quantization_config
from headrace.lab.compress.formats.publish import published
from headrace.lab.compress.formats.shards import SHARD_BYTES, Shards
from headrace.lab.compress.formats.side_files import side_files, token_ids
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Dense
from headrace.model.weights.gguf_architecture import ROPE_FACTORS, stores_interleaved_rope
from headrace.model.weights.gguf_checkpoint import half_split_rows
from headrace.model.weights.gguf_names import gguf_name
from headrace.model.weights.safetensors import hf_name

Format = Literal[
    "compressed-tensors",
    "gptq",
    "gptq-v2",
    "awq",
    "bf16",
    "f16",
    "f32",
    "gguf-q4_0",
    "gguf-q4_1",
    "gguf-q8_0",
    "gguf-f16",
]
FORMATS: tuple[Format, ...] = get_args(Format)
"""What can be written. ``bf16``, ``f16``, ``f32``: safetensors of floats."""

FloatType = Literal["bfloat16", "float16", "float32"]
Tensors = Mapping[str, QuantizedLinear | Dense]
"""By canonical name (``model/architecture.py``); read one at a time, once, in the mapping's order."""

_FLOATS: dict[Format, FloatType] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_DTYPES: dict[FloatType, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
_LAYOUTS = get_args(Layout)
_GGUF_TYPES = {"gguf-q4_0": "Q4_0", "gguf-q4_1": "Q4_1", "gguf-q8_0": "Q8_0"}
_FILE_TYPES = {"gguf-f16": 1, "gguf-q4_0": 2, "gguf-q4_1": 3, "gguf-q8_0": 7}  # llama.cpp's LLAMA_FTYPE
_EMBEDDINGS = ("embed.weight", "head.weight")
_PARTS = 5  # tensors that a weight becomes, at most


def write_checkpoint(
    folder: Path,
    form: Format,
    tensors: Tensors,
    *,
    architecture: Architecture,
    source: Path,
    dtype: FloatType = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model into ``folder``, which appears complete or not at all.

    ``tensors`` are all those of ``architecture``. Rounded ones keep their codes and scales; in the float
    formats, and where a GGUF type has no room for them, they become floats. ``source``: the model whose
    tokenizer, chat template and generation settings go along. ``dtype``: of floats beside rounded weights, in
    Transformers folders; ``form`` says it for the float formats. In GGUF, norms and biases are float32,
    embedding and head Q8_0 where the linears are rounded, and other floats float16.

    Raises ConfigError for what the format cannot hold, or a folder that exists; ModelFormatError for a source
    without a usable tokenizer; HeadraceError if the folder cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"There is no format {form!r}: it must be one of {', '.join(FORMATS)}.")
    if form.startswith("gguf-"):
        _write_gguf(folder, form, tensors, architecture, source)
    else:
        _write_folder(folder, form, tensors, architecture, source, _FLOATS.get(form, dtype), shard_bytes)


def _write_folder(
    folder: Path,
    form: Format,
    tensors: Tensors,
    architecture: Architecture,
    source: Path,
    dtype: FloatType,
    shard_bytes: int,
) -> None:
    layout: Layout | None = next((name for name in _LAYOUTS if name == form), None)
    config = config_of(architecture)
    files = side_files(source)
    config |= token_ids(source, files) | {"torch_dtype": dtype}
    schemes: dict[str, Scheme] = {}
    plain: list[str] = []
    with published(folder) as draft:
        with Shards(draft, len(tensors) * _PARTS, shard_bytes=shard_bytes) as shards:
            for name, tensor in tensors.items():
                module = _module_name(name, architecture)
                if isinstance(tensor, QuantizedLinear) and layout is not None:
                    schemes[module] = tensor.scheme
                    for part, array in parts_of(layout, module, tensor).items():
                        shards.add(f"{module}.{part}", array)
                    continue
                if name.endswith(".weight") and name not in ("embed.weight",) and len(tensor.shape) == 2:
                    plain.append(module)
                kind = name.rpartition(".")[2]
                shards.add(f"{module}.{kind}", _floats(name, tensor, architecture, dtype))
        if architecture.tied_head:
            plain.append("lm_head")
        if layout is not None:
            if not schemes:
                raise ConfigError(f"Nothing is rounded, so there is nothing to write as {form}: use bf16.")
            config["quantization_config"] = quantization_config(layout, schemes, plain)
        for name, content in files.items():
            (draft / name).write_bytes(content)
        (draft / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def _module_name(name: str, architecture: Architecture) -> str:
    """What Transformers calls the layer that a canonical tensor belongs to."""
    if name == "head.weight":
        return "lm_head"
    post_norms = any(layer.post_norms for layer in architecture.layers)
    return f"model.{hf_name(name, post_norms)}".rpartition(".")[0]


def _floats(
    name: str, tensor: QuantizedLinear | Dense, architecture: Architecture, dtype: FloatType
) -> NDArray[Any]:
    if isinstance(tensor, QuantizedLinear):
        tensor = tensor.dequantize()
    if architecture.family == "gemma3" and "norm" in name:
        tensor = tensor.astype(np.float32) - np.float32(1)  # its own implementation adds it
    with np.errstate(over="ignore"):
        narrow: NDArray[Any] = tensor.astype(np.float32).astype(_DTYPES[dtype])
    if dtype == "float16" and not np.isfinite(narrow.astype(np.float32)).all():
        raise ConfigError(f"{name} has weights beyond float16: write bfloat16 or float32.")
    return narrow


def _write_gguf(
    folder: Path, form: Format, tensors: Tensors, architecture: Architecture, source: Path
) -> None:
    metadata = architecture_metadata(architecture)
    metadata |= {
        "general.name": folder.name,
        "general.file_type": _FILE_TYPES[form],
        "general.quantization_version": 2,
    }
    metadata |= tokenizer_metadata(source, architecture.vocab_size)
    with published(folder) as draft, GGUFWriter(draft / f"{folder.name}.gguf", metadata) as file:
        if (factors := rope_factors(architecture)) is not None:
            file.add(ROPE_FACTORS, encode_dense(ROPE_FACTORS, factors, "F32"))
        for name, tensor in _stored_rows(tensors, architecture):
            file.add(gguf_name(name), _encoded(name, tensor, form))


def _encoded(name: str, tensor: QuantizedLinear | Dense, form: Format) -> Encoded:
    kind = _GGUF_TYPES.get(form)
    if isinstance(tensor, QuantizedLinear):
        if kind is None:
            return encode_dense(name, tensor.dequantize(), "F16")
        return encode_linear(name, tensor, kind)
    if tensor.ndim == 1:
        return encode_dense(name, tensor, "F32")
    if name in _EMBEDDINGS and kind is not None:
        return encode_embedding(name, tensor)
    return encode_dense(name, tensor, "F16")


def _stored_rows(
    tensors: Tensors, architecture: Architecture
) -> Iterator[tuple[str, QuantizedLinear | Dense]]:
    """The tensors with the rows of q and k as GGUF keeps them: interleaved, in some families."""
    interleaved = architecture.family == "mistral" or stores_interleaved_rope(architecture)
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        part = stem.partition(".attention.")[2]
        if interleaved and part in ("q", "k") and kind in ("weight", "bias"):
            spec = architecture.layers[int(name.split(".")[1])].attention
            assert spec.rope is not None
            heads = spec.heads if part == "q" else spec.kv_heads
            rows = np.argsort(half_split_rows(heads, spec.head_dim, spec.rope.dim))
            tensor = tensor.take_rows(rows) if isinstance(tensor, QuantizedLinear) else tensor[rows]
        yield name, tensor
