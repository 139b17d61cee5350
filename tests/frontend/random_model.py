"""A model that takes no time to load or to run, with any tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def random_model(folder: Path, vocab_size: int, tokenizer: bytes) -> Path:
    """A Llama of random weights and hardly any layers: always wrong, and cheap."""
    rng = np.random.default_rng(1)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    layer = {
        **{f"self_attn.{name}_proj": (64, 64) for name in "qkvo"},
        **{f"mlp.{name}_proj": (64, 64) for name in ("gate", "up", "down")},
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocab_size, 64), "model.norm.weight": (64,)}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder
