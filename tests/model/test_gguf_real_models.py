"""The real GGUF models: read by us, run by transformers in float32, they know what they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.model.architecture import Architecture, RopeSpec
from headrace.model.checkpoint import as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint

_NAMES = [  # canonical to transformers, applied in order
    (r"^embed", "embed_tokens"),
    (r"^final_norm", "norm"),
    (r"attention\.([qkvo])\.", r"self_attn.\1_proj."),
    (r"attention\.([qk])_norm", r"self_attn.\1_norm"),
    (r"\.attention_norm", ".input_layernorm"),
    (r"attention_post_norm", "post_attention_layernorm"),
    (r"feed_forward_post_norm", "post_feedforward_layernorm"),
    (r"feed_forward\.(\w+)\.", r"mlp.\1_proj."),
]


def next_token(
    checkpoint: GGUFCheckpoint, kind: type, config: transformers.PretrainedConfig, prompt: list[str]
) -> str:
    """The most likely token after ``prompt`` when transformers runs the checkpoint's dequantised weights."""
    gemma = checkpoint.architecture.family == "gemma3"
    norm = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    state = {}
    for name in checkpoint.names():
        weight = as_float32(checkpoint.tensor(name))
        if gemma and name.endswith("norm.weight"):
            weight = weight - 1  # transformers' Gemma adds it
        value = torch.from_numpy(weight if weight.flags.writeable else weight.copy())
        for pattern, replacement in [*_NAMES, (r"feed_forward_norm", norm)]:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    with torch.device("meta"):
        model = kind(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.rotary_emb = type(model.rotary_emb)(config)  # computed, not stored: must leave the meta device
    if gemma:
        embed = model.embed_tokens
        embed.embed_scale = torch.tensor(checkpoint.architecture.embedding_scale)
    tokens: list[str] = checkpoint.file.metadata["tokenizer.ggml.tokens"]
    with torch.no_grad():
        hidden = model.eval()(torch.tensor([[tokens.index(t) for t in prompt]])).last_hidden_state[0, -1]
        return tokens[int((state["embed_tokens.weight"] @ hidden).argmax())]


def common(arch: Architecture) -> dict[str, Any]:
    layer = arch.layers[0]
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": len(arch.layers),
        "num_attention_heads": layer.attention.heads,
        "num_key_value_heads": layer.attention.kv_heads,
        "head_dim": layer.attention.head_dim,
        "intermediate_size": layer.feed_forward.width,
        "rms_norm_eps": layer.norm.eps,
        "max_position_embeddings": arch.max_positions,
    }


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    arch = checkpoint.architecture
    assert (arch.family, arch.vocab_size, arch.hidden_size, len(arch.layers)) == ("llama", 49152, 576, 30)
    assert arch.layers[0].attention.rope == RopeSpec(100_000.0, 64)
    assert arch.tied_head
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    config = transformers.LlamaConfig(**common(arch), rope_parameters=rope)
    prompt = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert next_token(checkpoint, transformers.LlamaModel, config, prompt) == "ĠParis"


def test_gemma3(gemma3_path: Path) -> None:
    checkpoint = GGUFCheckpoint(gemma3_path)
    arch = checkpoint.architecture
    assert (arch.family, arch.vocab_size, arch.hidden_size, len(arch.layers)) == ("gemma3", 262_144, 640, 18)
    assert [index for index, layer in enumerate(arch.layers) if layer.attention.window is None] == [5, 11, 17]
    assert arch.layers[0].attention.window == 512
    kinds = {
        tensor.bits
        for tensor in map(checkpoint.tensor, checkpoint.names())
        if isinstance(tensor, QuantTensor)
    }
    assert kinds == {4, 5, 6, 8}
    config = transformers.Gemma3TextConfig(**common(arch), sliding_window=512, query_pre_attn_scalar=256)
    prompt = ["<bos>", "Paris", "▁is", "▁the", "▁capital", "▁of"]
    assert next_token(checkpoint, transformers.Gemma3TextModel, config, prompt) == "▁France"
