"""Checkpoints that other engines convert from: dequantised weights, or random ones of a given shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.frontend.tokenizer_cache import convert_file
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint

Dtype = Literal["float32", "bfloat16"]
_SHARD_BYTES = 1 << 30

LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""The shape of Llama 3.2 1B, without the scaling of its rotary embedding."""

_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def write_dequantised(source: Path, target: Path, dtype: Dtype) -> None:
    """A Transformers folder with the weights of ``source`` (a checkpoint of the Llama family) as floats.

    Raises ConfigError for other families, before anything is written.
    """
    checkpoint = open_checkpoint(source)
    config = _config_of(checkpoint.architecture)
    tensors = ((_transformers_name(name), as_float32(checkpoint.tensor(name))) for name in checkpoint.names())
    _write(target, config, dtype, tensors, source)


def write_random(target: Path, config: dict[str, Any], tokenizer_of: Path, seed: int = 0) -> None:
    """A Transformers folder of random bf16 weights: right for speed, meaningless as text."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)

    hidden, width = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ones = np.ones(hidden, np.float32)

    def tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for name, rows, columns in (
                ("self_attn.q_proj", queries, hidden),
                ("self_attn.k_proj", keys, hidden),
                ("self_attn.v_proj", keys, hidden),
                ("self_attn.o_proj", hidden, queries),
                ("mlp.gate_proj", width, hidden),
                ("mlp.up_proj", width, hidden),
                ("mlp.down_proj", hidden, width),
            ):
                yield f"{prefix}{name}.weight", matrix(rows, columns)
            yield f"{prefix}input_layernorm.weight", ones
            yield f"{prefix}post_attention_layernorm.weight", ones
        yield "model.norm.weight", ones

    _write(target, config, "bfloat16", tensors(), tokenizer_of)


def _transformers_name(name: str) -> str:
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    if name == "final_norm.weight":
        return "model.norm.weight"
    if name == "head.weight":
        return "lm_head.weight"
    _, layer, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_NAMES[stem]}.{kind}"


def _config_of(architecture: Architecture) -> dict[str, Any]:
    layer = architecture.layers[0]
    attention, rope = layer.attention, layer.attention.rope
    plain = (
        architecture.family == "llama"
        and architecture.encoder is None
        and rope is not None
        and rope.scaling == "none"
        and not rope.factors
        and attention.window is None
        and not attention.qkv_bias
        and not attention.out_bias
    )
    if not plain or rope is None:
        raise ConfigError(
            f"only plain Llama models are written as Transformers folders, and this is "
            f"{architecture.family!r}; give a folder of config.json and safetensors"
        )
    return {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": layer.feed_forward.width,
        "num_hidden_layers": len(architecture.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": layer.feed_forward.activation,
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.max_positions,
        "rms_norm_eps": architecture.final_norm.eps,
        "rope_theta": rope.base,
        "tie_word_embeddings": architecture.tied_head,
    }


def _write(
    target: Path,
    config: dict[str, Any],
    dtype: Dtype,
    tensors: Iterator[tuple[str, NDArray[np.float32]]],
    tokenizer_of: Path,
) -> None:
    target.mkdir(parents=True)
    files = convert_file(tokenizer_of)
    for name, content in files.items():
        (target / name).write_bytes(content)
    described = {**json.loads(files["tokenizer_config.json"]), "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    ends = json.loads(files["generation_config.json"])
    (target / "config.json").write_text(json.dumps({**fixed, **ends, **config}, indent=1))
    _write_shards(target, np.float32 if dtype == "float32" else ml_dtypes.bfloat16, tensors)


def _write_shards(target: Path, kind: Any, tensors: Iterator[tuple[str, NDArray[np.float32]]]) -> None:
    """Files of about a GiB, and the index that says which tensor is in which."""
    from safetensors.numpy import save_file

    held: dict[str, Any] = {}
    weight_map: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(held, target / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, name))
        held.clear()

    for name, values in tensors:
        held[name] = np.ascontiguousarray(values.astype(kind))
        total += held[name].nbytes
        if sum(array.nbytes for array in held.values()) > _SHARD_BYTES:
            flush()
    if held:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
