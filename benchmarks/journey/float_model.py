"""The model as a Transformers folder in bfloat16: what the baseline and the first steps load."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.frontend.tokenizer_cache import convert_file
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint, as_float32
from headrace.model.weights import open_checkpoint
from headrace.paths import cache_dir

_PARTS = {
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
_OUTER = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def float_folder(path: Path) -> Path:
    """A folder that transformers loads, with the weights of the model at ``path``.

    A folder of safetensors is taken as it is. A GGUF file of the Llama family is dequantised and rounded to
    bfloat16, once: the folder is kept in the cache. Raises ConfigError for other families.
    """
    if path.is_dir() and (path / "config.json").is_file():
        return path
    checkpoint = open_checkpoint(path)
    config = llama_config(checkpoint.architecture)
    key = hashlib.blake2b(checkpoint.fingerprint().encode(), digest_size=8).hexdigest()
    folder = cache_dir() / "journey" / f"{path.stem}-{key}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        _write(checkpoint, config, unfinished)
        for name, content in convert_file(checkpoint.path).items():
            (unfinished / name).write_bytes(content)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def llama_config(arch: Architecture) -> dict[str, Any]:
    """The architecture as ``config.json`` of a Llama. Raises ConfigError if it is something else."""
    layer = arch.layers[0]
    attention, feed_forward = layer.attention, layer.feed_forward
    plain = (
        arch.family == "llama"
        and arch.encoder is None
        and attention.rope is not None
        and attention.rope.scaling == "none"
        and not attention.rope.factors
        and attention.window is None
        and not attention.qkv_bias
        and not attention.out_bias
    )
    if not plain or attention.rope is None:
        raise ConfigError(
            f"the journey turns GGUF files of plain Llama models into Transformers folders, and this is "
            f"{arch.family!r}; give a folder of config.json and safetensors"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": feed_forward.width,
        "num_hidden_layers": len(arch.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": feed_forward.activation,
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": layer.norm.eps,
        "rope_theta": attention.rope.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope.base},
        "tie_word_embeddings": arch.tied_head,
    }


def _write(checkpoint: Checkpoint, config: dict[str, Any], folder: Path) -> None:
    import ml_dtypes
    from safetensors.numpy import save_file

    tensors = {
        _name(name): as_float32(checkpoint.tensor(name)).astype(ml_dtypes.bfloat16)
        for name in checkpoint.names()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _name(canonical: str) -> str:
    stem, _, kind = canonical.rpartition(".")
    if not stem.startswith("layers."):
        return f"{_OUTER[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    return f"model.layers.{index}.{_PARTS[inner]}.{kind}"
