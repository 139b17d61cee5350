"""Every family through a GGUF file: our reading of it, run by the float32 oracle, equals transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.backend.torch import reference_logits
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint
from tests.model.gguf_files import write_gguf
from tests.model.tiny import CASES, randomise

_FAMILIES = {
    **{"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"gemma3_text": "gemma3"},
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def neighbouring_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as converters store them for ``llama``: the two halves of every head interleaved."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def export(model: Any, path: Path) -> Path:
    """Write a transformers model as converters do."""
    config = model.config
    family = _FAMILIES[config.model_type]
    parts = _PARTS | (_GEMMA_NORMS if family == "gemma3" else _NORMS)
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if "norm" in stem and family == "gemma3":
            value = value + 1
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            q = stem.endswith("q_proj")
            value = neighbouring_pairs(value, config.num_attention_heads if q else config.num_key_value_heads)
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            tensors[f"blk.{index}.{parts[part]}.{kind}"] = value
        else:
            outer = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
            tensors[f"{outer[stem]}.{kind}"] = value
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    rope = config.rope_parameters
    if family == "gemma3":
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        keys["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in config.layer_types
        ]
        rope = rope["full_attention"]
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq.numpy()
        plain = rope["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    metadata = {"general.architecture": family, **{f"{family}.{key}": value for key, value in keys.items()}}
    return write_gguf(path, metadata, tensors)


def assert_same_logits(model: Any, folder: Path) -> None:
    checkpoint = GGUFCheckpoint(export(model, folder / "model.gguf"))
    prompt = np.random.default_rng(7).integers(0, 298, 75).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(reference_logits(checkpoint, prompt), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "llama2",
        "llama3",
        "llama-linear",
        "llama-yarn",
        "llama-biases",
        "smollm2",
        "mistral",
        "mistral-nowindow",
        "qwen2",
        "qwen2.5",
        "qwen3",
    ],
)
def test_logits(name: str, tmp_path: Path) -> None:
    assert_same_logits(CASES[name](tmp_path), tmp_path)


def test_gemma3_logits(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,  # GGUF has no key for another
        max_position_embeddings=512,
        sliding_window=24,
        attn_implementation="eager",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    assert_same_logits(randomise(transformers.AutoModelForCausalLM.from_config(config)), tmp_path)
