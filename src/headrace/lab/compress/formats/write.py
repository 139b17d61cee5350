"""Writing a compressed model in a format that other programs load."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.format_names import Format, Layout
from headrace.lab.compress.formats.config_json import config_of
from headrace.lab.compress.formats.gguf_blocks import (
    Encoded,
    block_type,
    encode_dense,
    encode_embedding,
    encode_linear,
    no_type,
)
from headrace.lab.compress.formats.gguf_file import GGUFWriter
from headrace.lab.compress.formats.gguf_metadata import architecture_metadata, rope_factors
from headrace.lab.compress.formats.gguf_tokens import tokenizer_metadata
from headrace.lab.compress.formats.layouts import check_layout, no_kv_scales, parts_of, quantization_config
from headrace.lab.compress.formats.publish import published
from headrace.lab.compress.formats.shards import SHARD_BYTES, Shards
from headrace.lab.compress.formats.side_files import side_files, token_ids
from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint, Dense
from headrace.model.weights.gguf_architecture import ROPE_FACTORS, stores_interleaved_rope
from headrace.model.weights.gguf_checkpoint import half_split_rows
from headrace.model.weights.gguf_names import gguf_name
from headrace.model.weights.safetensors import hf_name
from headrace.model.weights.tensor_shapes import expected_shapes

FORMATS: tuple[Format, ...] = get_args(Format)

FloatType = Literal["bfloat16", "float16", "float32"]
Tensors = Mapping[str, QuantizedLinear | Dense]
"""By canonical name (``model/architecture.py``); each is read once, in the mapping's order."""

_DTYPES: dict[FloatType, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
_GGUF_FLOATS: dict[FloatType, Literal["BF16", "F16", "F32"]] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # llama.cpp's LLAMA_FTYPE
_EMBEDDINGS = ("embed.weight", "head.weight")
_PARTS = 5  # tensors that a weight becomes, at most


def check_format(
    form: str, schemes: Mapping[str, Scheme], source: Checkpoint, *, kv_scales: bool = False
) -> None:
    """Raise, before anything is computed, what :func:`write_checkpoint` would raise.

    ``schemes``: of the weights that will be rounded, by canonical name; ``kv_scales``: there will be some.
    """
    architecture = source.architecture
    shapes = expected_shapes(architecture)
    if kv_scales and _format(form) != "compressed-tensors":
        raise no_kv_scales(form)
    if _format(form) == "gguf":
        architecture_metadata(architecture)
        tokenizer_metadata(source.path, architecture.vocab_size)
        for name, scheme in schemes.items():
            if block_type(scheme, shapes[name][1]) is None:
                raise no_type(name, scheme)
        return
    config_of(architecture)
    side_files(source.path)
    layout = _layout(form)
    if layout is None:
        return
    modules = {_module_name(name, architecture): scheme for name, scheme in schemes.items()}
    for name, scheme in schemes.items():
        check_layout(layout, name, scheme, (shapes[name][0], shapes[name][1]))
    plain = [name for name, shape in shapes.items() if name not in schemes and _is_linear(name, shape)]
    plain = [_module_name(name, architecture) for name in plain]
    _quantization_config(layout, modules, plain, kv_scales=kv_scales)


def write_checkpoint(
    folder: Path,
    form: str,
    tensors: Tensors,
    source: Checkpoint,
    *,
    architecture: Architecture | None = None,
    dtype: FloatType | None = None,
    shard_bytes: int = SHARD_BYTES,
    kv_scales: Sequence[tuple[float, float]] = (),
) -> None:
    """Write a model into ``folder``, which appears complete or not at all, in one of :data:`FORMATS`.

    ``tensors`` are all those of ``architecture``, by default the source's. Rounded ones keep their codes and
    scales; as ``float`` they become floats. ``source``: whose tokenizer, chat template and generation
    settings go along. ``dtype``: of the other tensors, bfloat16 by default; in GGUF float16, where norms and
    biases are float32 and, beside rounded weights, embedding and head Q8_0. ``kv_scales``: of each layer's
    keys and values, for compressed-tensors.

    Raises ConfigError for what the format cannot hold, or a folder that exists; ModelFormatError for a source
    without a usable tokenizer; OSError if the folder cannot be written.
    """
    shape = source.architecture if architecture is None else architecture
    if kv_scales and _format(form) != "compressed-tensors":
        raise no_kv_scales(form)
    if _format(form) == "gguf":
        _write_gguf(folder, tensors, shape, source.path, dtype or "float16")
    else:
        kind = dtype or "bfloat16"
        _write_folder(folder, form, tensors, shape, source.path, kind, shard_bytes, kv_scales)


def _format(form: str) -> str:
    if form not in FORMATS:
        raise ConfigError(f"There is no format {form!r}: it must be one of {', '.join(FORMATS)}.")
    return form


def _layout(form: str) -> Layout | None:
    layouts: tuple[Layout, ...] = get_args(Layout)
    return next((layout for layout in layouts if layout == form), None)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name != "embed.weight"


def _quantization_config(
    layout: Layout, schemes: Mapping[str, Scheme], plain: list[str], *, kv_scales: bool
) -> dict[str, Any]:
    if not schemes:
        raise ConfigError(f"Nothing is rounded, so there is nothing to write as {layout}: write float.")
    return quantization_config(layout, schemes, plain, kv_scales=kv_scales)


def _write_folder(
    folder: Path,
    form: str,
    tensors: Tensors,
    architecture: Architecture,
    source: Path,
    dtype: FloatType,
    shard_bytes: int,
    kv_scales: Sequence[tuple[float, float]],
) -> None:
    layout = _layout(form)
    config = config_of(architecture)
    files = side_files(source)
    config |= token_ids(source, files) | {"torch_dtype": dtype}
    schemes: dict[str, Scheme] = {}
    plain: list[str] = []
    with published(folder) as draft:
        count = len(tensors) * _PARTS + 2 * len(kv_scales)
        with Shards(draft, count, shard_bytes=shard_bytes) as shards:
            for name, tensor in tensors.items():
                module = _module_name(name, architecture)
                if isinstance(tensor, QuantizedLinear) and layout is not None:
                    schemes[module] = tensor.scheme
                    for part, array in parts_of(layout, module, tensor).items():
                        shards.add(f"{module}.{part}", array)
                    continue
                if _is_linear(name, tensor.shape):
                    plain.append(module)
                kind = name.rpartition(".")[2]
                shards.add(f"{module}.{kind}", _floats(name, tensor, architecture, dtype))
            for index, scales in enumerate(kv_scales):
                attention = _module_name(f"layers.{index}.attention.q.weight", architecture).rpartition(".")[
                    0
                ]
                for part, scale in zip(("k_scale", "v_scale"), scales, strict=True):
                    shards.add(f"{attention}.{part}", np.array([scale], np.float32))
        if layout is not None:
            if architecture.tied_head:
                plain.append(_module_name("head.weight", architecture))  # to others it is a linear of its own
            described = _quantization_config(layout, schemes, plain, kv_scales=bool(kv_scales))
            config["quantization_config"] = described
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
    folder: Path, tensors: Tensors, architecture: Architecture, source: Path, dtype: FloatType
) -> None:
    metadata = architecture_metadata(architecture) | tokenizer_metadata(source, architecture.vocab_size)
    metadata |= {"general.name": folder.name.strip("."), "general.quantization_version": 2}
    kinds: Counter[str] = Counter()
    with published(folder) as draft, GGUFWriter(draft / "model.gguf", metadata) as file:
        if (factors := rope_factors(architecture)) is not None:
            file.add(ROPE_FACTORS, encode_dense(ROPE_FACTORS, factors, "F32"))
        embeddings = []
        for name, tensor in _stored_rows(tensors, architecture):
            if name in _EMBEDDINGS and not isinstance(tensor, QuantizedLinear):
                embeddings.append((name, tensor))  # how they are kept depends on what comes
                continue
            encoded = _encoded(name, tensor, _GGUF_FLOATS[dtype])
            kinds[encoded.type] += _is_linear(name, tensor.shape)
            file.add(gguf_name(name), encoded)
        most, _ = kinds.most_common(1)[0]
        for name, tensor in embeddings:
            rounded = most not in _GGUF_FLOATS.values()
            encoded = (
                encode_embedding(name, tensor) if rounded else _encoded(name, tensor, _GGUF_FLOATS[dtype])
            )
            file.add(gguf_name(name), encoded)
        metadata["general.file_type"] = _FILE_TYPES[most]


def _encoded(name: str, tensor: QuantizedLinear | Dense, floats: Literal["BF16", "F16", "F32"]) -> Encoded:
    if isinstance(tensor, QuantizedLinear):
        return encode_linear(name, tensor)
    return encode_dense(name, tensor, "F32" if tensor.ndim == 1 else floats)


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
            tensor = _take_rows(tensor, rows) if isinstance(tensor, QuantizedLinear) else tensor[rows]
        yield name, tensor


def _take_rows(linear: QuantizedLinear, rows: NDArray[np.intp]) -> QuantizedLinear:
    zero = None if linear.zero is None else linear.zero[rows]
    return replace(linear, codes=linear.codes[rows], scale=linear.scale[rows], zero=zero)
