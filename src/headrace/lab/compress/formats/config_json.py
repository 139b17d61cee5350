"""An :class:`Architecture` as ``config.json``: the inverse of ``model/weights/hf_config.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.errors import ConfigError
from headrace.model.architecture import Architecture, LayerSpec, RopeSpec
from headrace.model.weights.hf_config import architecture_from_hf

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}


def config_of(architecture: Architecture) -> dict[str, Any]:
    """The keys that describe the network; none of its tokens, dtype or quantisation.

    Raises ConfigError for a network that no class of transformers has: layers that differ in more than their
    attention window, say, or rotary factors that came out of a GGUF file.
    """
    config = _config(architecture)
    if _rounded(architecture_from_hf(config)) != _rounded(architecture):
        raise ConfigError(
            f"The model differs from what a {architecture.family} config.json can say (biases, windows or "
            "rotary embedding): it cannot be written as a Transformers folder."
        )
    return config


def _config(architecture: Architecture) -> dict[str, Any]:
    family = architecture.family
    if family not in _CLASSES or architecture.encoder is not None:
        raise ConfigError(f"A model of the family {family!r} cannot be written as a Transformers folder.")
    layer = _the_layer(architecture)
    attention, feed_forward = layer.attention, layer.feed_forward
    model_type, class_name = _CLASSES[family]
    gemma = family == "gemma3"
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": feed_forward.width,
        "num_hidden_layers": len(architecture.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": architecture.max_positions,
        "rms_norm_eps": architecture.final_norm.eps,
        "tie_word_embeddings": architecture.tied_head,
        "hidden_activation" if gemma else "hidden_act": _ACTIVATIONS[feed_forward.activation],
    }
    if family in ("llama", "qwen3", "gemma3"):
        config["attention_bias"] = attention.out_bias
    if family == "llama":
        config["mlp_bias"] = feed_forward.bias
    if gemma:
        config |= {
            "query_pre_attn_scalar": round(attention.scale**-2, 6),
            "final_logit_softcapping": architecture.logit_softcap,
            "attn_logit_softcapping": attention.softcap,
        }
    return config | _windows(architecture) | _ropes(architecture)


def _rounded(architecture: Architecture) -> Architecture:
    """Without what readers compute a last bit apart."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, scale=round(layer.attention.scale, 12)))
        for layer in architecture.layers
    )
    return replace(architecture, layers=layers)


def _the_layer(architecture: Architecture) -> LayerSpec:
    """What all layers are but for windows, and the rotary embedding that goes with them."""

    def common(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, window=None, rope=None), kv_group=0)

    first = common(architecture.layers[0])
    for index, layer in enumerate(architecture.layers):
        if common(layer) != first:
            raise ConfigError(
                f"Layer {index} has other sizes than layer 0: no class of transformers describes that."
            )
    return architecture.layers[0]


def _windows(architecture: Architecture) -> dict[str, Any]:
    windows = [layer.attention.window for layer in architecture.layers]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ConfigError("Layers have attention windows of several sizes: no class of transformers does.")
    window = next(iter(sizes), None)
    kinds = ["full_attention" if each is None else "sliding_attention" for each in windows]
    if architecture.family == "mistral":
        if len(set(windows)) > 1:
            raise ConfigError("Only some layers have an attention window: Mistral's have it in all or none.")
        return {"sliding_window": window}
    if architecture.family == "gemma3":
        return {"sliding_window": window or architecture.max_positions, "layer_types": kinds}
    if window is None:
        return {}
    if architecture.family == "llama":
        raise ConfigError(
            "A Llama model with an attention window cannot be written as a Transformers folder."
        )
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _ropes(architecture: Architecture) -> dict[str, Any]:
    by_window = {layer.attention.window is None: layer.attention.rope for layer in architecture.layers}
    if architecture.family != "gemma3":
        rope = architecture.layers[0].attention.rope
        return {} if rope is None else _rope(rope)
    full, local = by_window.get(True), by_window.get(False)
    config = {} if full is None else _rope(full)
    return config if local is None else config | {"rope_local_base_freq": local.base}


def _rope(rope: RopeSpec) -> dict[str, Any]:
    if rope.factors:
        raise ConfigError(
            "The model's rotary frequencies have a divisor each, as only GGUF files tell them: write a GGUF "
            "file, or start from the model's own safetensors."
        )
    config: dict[str, Any] = {"rope_theta": rope.base}
    if rope.scaling == "none":
        return config
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    if rope.scaling == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return config | {"rope_scaling": scaling}
