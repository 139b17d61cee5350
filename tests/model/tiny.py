"""Tiny random-weight transformers models, saved as checkpoints: one case per kind of architecture.

``CASES[name](folder)`` writes ``config.json`` and ``model.safetensors`` (float32) into ``folder`` and returns
the transformers model, ready to compare with. Weights are drawn wide enough that attention is far from
uniform and logits are of order one: a wrong window, norm or rotation shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

torch.set_num_threads(1)  # tiny matrices gain nothing from threads, and tests share the machine

Builder = Callable[[Path], Any]

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}


def randomise(model: Any, seed: int = 1) -> Any:
    """Overwrite every parameter with seeded noise at a scale that keeps activations of order one."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=noise)
            if "norm" in name.lower():
                # around 1, or around 0 where the model itself adds the 1
                parameter.copy_(parameter + 0.2 * values)
            elif name.endswith("bias") or "embed" in name:
                parameter.copy_(0.5 * values)
            else:
                parameter.copy_(values * 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Any:
    """Write the model's checkpoint into ``folder`` and return the model."""
    model.save_pretrained(folder, **options)
    return model


def _case(config_type: type[Any], **changes: Any) -> Builder:
    def build(folder: Path) -> Any:
        config = config_type(**{**_SIZES, **changes})
        return save(randomise(transformers.AutoModelForCausalLM.from_config(config)), folder)

    return build


def _gemma3_multimodal(folder: Path) -> Any:
    text = Gemma3TextConfig(**{**_SIZES, **_GEMMA})
    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    config._attn_implementation = "eager"
    return save(randomise(transformers.Gemma3ForConditionalGeneration(config)), folder)


_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

CASES: dict[str, Builder] = {
    "llama2": _case(LlamaConfig, num_key_value_heads=4),
    "llama3": _case(LlamaConfig, rope_parameters=_LLAMA3_ROPE, rms_norm_eps=1e-5),
    "llama-linear": _case(
        LlamaConfig, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    ),
    "llama-yarn": _case(LlamaConfig, rope_parameters=_YARN_ROPE),
    "llama-biases": _case(LlamaConfig, attention_bias=True, mlp_bias=True),
    "smollm2": _case(
        LlamaConfig,
        tie_word_embeddings=True,
        num_attention_heads=3,
        hidden_size=96,
        vocab_size=307,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "mistral": _case(MistralConfig, sliding_window=20),
    "mistral-nowindow": _case(MistralConfig, sliding_window=None, head_dim=32),
    "qwen2": _case(Qwen2Config, tie_word_embeddings=True),
    "qwen2.5": _case(Qwen2Config, rms_norm_eps=1e-6, rope_parameters=_YARN_ROPE),
    "qwen2-window": _case(Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": _case(Qwen3Config, head_dim=32),
    "gemma3": _case(Gemma3TextConfig, **_GEMMA),
    "gemma3-softcap": _case(Gemma3TextConfig, **_GEMMA, final_logit_softcapping=3.0),
    "gemma3-multimodal": _gemma3_multimodal,
}
