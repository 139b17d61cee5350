"""An :class:`Architecture` as GGUF metadata: the inverse of ``model/weights/gguf_architecture.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.model.architecture import Architecture, RopeSpec

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def architecture_metadata(architecture: Architecture) -> dict[str, Any]:
    """All keys that describe the network. Raises ConfigError for one that GGUF has no name for."""
    name = "llama" if architecture.family == "mistral" else architecture.family
    if name not in FAMILIES or architecture.encoder is not None:
        raise ConfigError(f"A model of the family {architecture.family!r} cannot be written as GGUF.")
    layers = architecture.layers
    attention = layers[0].attention
    if not math.isclose(attention.scale, attention.head_dim**-0.5, rel_tol=1e-6):
        raise ConfigError(
            f"GGUF cannot tell an attention scale of {attention.scale:g}, which is not that of the head."
        )
    keys: dict[str, Any] = {
        "block_count": len(layers),
        "context_length": architecture.max_positions,
        "embedding_length": architecture.hidden_size,
        "feed_forward_length": _each([layer.feed_forward.width for layer in layers]),
        "vocab_size": architecture.vocab_size,
        "attention.head_count": _each([layer.attention.heads for layer in layers]),
        "attention.head_count_kv": _each([layer.attention.kv_heads for layer in layers]),
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": architecture.final_norm.eps,
    }
    keys |= _windows(architecture, gemma=name == "gemma3")
    full = next((layer.attention.rope for layer in layers if layer.attention.window is None), attention.rope)
    if full is None:
        raise ConfigError("A model without rotary embedding cannot be written as GGUF.")
    keys |= _rope(full)
    if name == "gemma3" and attention.window is not None and attention.rope is not None:
        keys["rope.freq_base_swa"] = attention.rope.base
    for key, cap in (
        ("final_logit_softcapping", architecture.logit_softcap),
        ("attn_logit_softcapping", attention.softcap),
    ):
        if cap is not None:
            keys[key] = cap
    prefixed = {f"{name}.{key}": value for key, value in keys.items()}
    return {"general.architecture": name, "general.alignment": 32} | prefixed


def rope_factors(architecture: Architecture) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    """One divisor for each rotary frequency, which is how GGUF tells Llama 3's scaling; None: it has none."""
    rope = architecture.layers[0].attention.rope
    if rope is None or (rope.scaling != "llama3" and not rope.factors):
        return None
    plain = RopeSpec(rope.base, rope.dim).inverse_frequencies()
    return np.array([a / b for a, b in zip(plain, rope.inverse_frequencies(), strict=True)], np.float32)


def _each(values: list[int]) -> Any:
    return values[0] if len(set(values)) == 1 else np.array(values, np.int32)


def _windows(architecture: Architecture, *, gemma: bool) -> dict[str, Any]:
    windows = [layer.attention.window for layer in architecture.layers]
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {"attention.sliding_window": architecture.max_positions} if gemma else {}
    if len(sizes) > 1 or (not gemma and None in windows):
        raise ConfigError("GGUF cannot tell which layers of this family have which attention window.")
    keys: dict[str, Any] = {"attention.sliding_window": sizes.pop()}
    if gemma:
        keys["attention.sliding_window_pattern"] = np.array([each is not None for each in windows])
    return keys


def _rope(rope: RopeSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.base}
    if rope.scaling in ("none", "llama3"):
        return keys
    keys |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope.original_max_positions,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
            "rope.scaling.attn_factor": rope.attention_factor / (1 + 0.1 * math.log(rope.factor)),
        }
    return keys
