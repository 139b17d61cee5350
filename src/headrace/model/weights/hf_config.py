"""Hugging Face ``config.json`` to :class:`~headrace.model.architecture.Architecture`.

Both generations of keys are read: ``rope_theta`` beside ``rope_scaling`` (transformers 4) and
``rope_parameters``, nested per layer type for Gemma 3 (transformers 5). Absent keys take the defaults of
transformers' configuration classes, except the sizes without which no model is described. Whatever would
make the network compute something else than its author meant is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.model.architecture import (
    Architecture,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from headrace.model.weights.bert import bert_architecture
from headrace.model.weights.hf_keys import ACTIVATIONS, Keys
from headrace.model.weights.hf_rope import rope_from_hf, rope_of_section


@dataclass(frozen=True, slots=True)
class _Family:
    """What a ``model_type`` implies: how its network differs, and transformers' defaults for its keys."""

    max_positions: int
    kv_heads: int | None = None  # None: as many as heads
    heads: int | None = None  # None: the key is required
    head_dim: int | None = None  # None: hidden_size / heads
    vocab_size: int | None = None  # None: the key is required
    tied_head: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False  # always there; else 'attention_bias' decides where the family has that key
    attention_bias_key: bool = False
    mlp_bias_key: bool = False
    gemma: bool = False  # post norms, scaled embeddings, soft caps, own key names


_FAMILIES = {
    "llama": _Family(2048, attention_bias_key=True, mlp_bias_key=True),
    "mistral": _Family(131072, kv_heads=8),
    "qwen2": _Family(32768, kv_heads=32, qkv_bias=True),
    "qwen3": _Family(32768, kv_heads=32, head_dim=128, qk_norm=True, attention_bias_key=True),
    "gemma3_text": _Family(
        131072,
        kv_heads=4,
        heads=8,
        head_dim=256,
        vocab_size=262208,
        tied_head=True,
        qk_norm=True,
        attention_bias_key=True,
        gemma=True,
    ),
}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """The network that a parsed ``config.json`` describes.

    Raises ModelFormatError, naming the key, when one is missing, of the wrong type, out of range, at odds
    with another, or asks for something that is not implemented.
    """
    keys = Keys(config)
    model_type = keys.text("model_type")
    for key in _EXPERT_KEYS:
        if keys.has(key):
            raise keys.wrong(key, "describes a mixture of experts, which is not supported")
    tied: bool | None = None
    if model_type == "gemma3":
        if keys.has("tie_word_embeddings"):
            tied = keys.flag("tie_word_embeddings", True)
        keys = keys.section("text_config")
        model_type = keys.text("model_type", "gemma3_text")
    if model_type == "bert":
        return bert_architecture(keys)
    family = _FAMILIES.get(model_type)
    if family is None:
        known = ", ".join([*_FAMILIES, "gemma3", "bert"])
        raise keys.wrong(
            "model_type", f"is {model_type!r}, which is not supported; it must be one of {known}"
        )
    if tied is None:
        tied = keys.flag("tie_word_embeddings", family.tied_head)

    hidden = keys.integer("hidden_size", high=2**20)
    norm = NormSpec("rms", keys.number("rms_norm_eps", 1e-6, high=1.0))
    max_positions = keys.integer("max_position_embeddings", family.max_positions)
    layers = _layers(keys, model_type, family, hidden, max_positions, norm)
    ropes = [layer.attention.rope for layer in layers]
    return Architecture(
        family="gemma3" if family.gemma else model_type,
        vocab_size=keys.integer("vocab_size", family.vocab_size, high=2**24),
        hidden_size=hidden,
        max_positions=min(max(max_positions, *(_stretched(rope) for rope in ropes)), 2**31 - 1),
        layers=layers,
        final_norm=norm,
        tied_head=tied,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        logit_softcap=_cap(keys, "final_logit_softcapping") if family.gemma else None,
    )


def _layers(
    keys: Keys, model_type: str, family: _Family, hidden: int, max_positions: int, norm: NormSpec
) -> tuple[LayerSpec, ...]:
    heads = keys.integer("num_attention_heads", family.heads, high=2**16)
    kv_heads = _kv_heads(keys, family, heads)
    head_dim = _head_dim(keys, family, hidden, heads)
    count = keys.integer("num_hidden_layers", high=4096)
    windows = _windows(keys, model_type, count)
    bias = family.attention_bias_key and keys.flag("attention_bias", False)
    act_key = "hidden_activation" if family.gemma else "hidden_act"
    act_name = keys.text(act_key, "gelu_pytorch_tanh" if family.gemma else "silu")
    if act_name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise keys.wrong(act_key, f"is {act_name!r}, which is not supported; it must be one of {known}")
    feed_forward = FeedForwardSpec(
        width=keys.integer("intermediate_size", high=2**24),
        activation=ACTIVATIONS[act_name],
        bias=family.mlp_bias_key and keys.flag("mlp_bias", False),
    )
    if family.gemma and keys.flag("use_bidirectional_attention", False):
        raise keys.wrong("use_bidirectional_attention", "is true: only causal models generate text")
    full_rope, local_rope = _ropes(keys, family, head_dim, max_positions)

    scale = (keys.number("query_pre_attn_scalar", 256.0) if family.gemma else head_dim) ** -0.5
    softcap = _cap(keys, "attn_logit_softcapping") if family.gemma else None

    groups: dict[int | None, int] = {}  # by window: the shape of a KV slot is the same in all layers
    layers = []
    for window in windows:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=full_rope if window is None else local_rope,
            scale=scale,
            window=window,
            qk_norm=norm if family.qk_norm else None,
            softcap=softcap,
            qkv_bias=family.qkv_bias or bias,
            out_bias=bias,
        )
        group = groups.setdefault(window, len(groups))
        layers.append(LayerSpec(attention, feed_forward, norm, post_norms=family.gemma, kv_group=group))
    return tuple(layers)


def _kv_heads(keys: Keys, family: _Family, heads: int) -> int:
    """Absent and ``null`` differ here: the first takes the family's default, the second means no grouping."""
    default = heads if keys.holds("num_key_value_heads") or family.kv_heads is None else family.kv_heads
    kv_heads = keys.integer("num_key_value_heads", default, high=2**16)
    if heads % kv_heads:
        raise keys.wrong(
            "num_key_value_heads", f"must divide 'num_attention_heads' ({heads}); {kv_heads} does not"
        )
    return kv_heads


def _head_dim(keys: Keys, family: _Family, hidden: int, heads: int) -> int:
    if not keys.has("head_dim") and family.head_dim is None and hidden % heads:
        raise keys.wrong(
            "hidden_size", f"must be a multiple of 'num_attention_heads' ({heads}); {hidden} is not"
        )
    head_dim = keys.integer("head_dim", family.head_dim or max(hidden // heads, 1), high=4096)
    if head_dim % 2:
        name = "head_dim" if keys.has("head_dim") else "hidden_size"
        raise keys.wrong(name, f"must give heads of an even width for rotary embedding, not {head_dim}")
    return head_dim


def _windows(keys: Keys, model_type: str, count: int) -> list[int | None]:
    """The attention window of each layer, in tokens; None sees the whole context."""
    if model_type == "llama":
        return [None] * count
    if model_type == "mistral":
        if keys.holds("sliding_window") and not keys.has("sliding_window"):
            return [None] * count
        return [keys.integer("sliding_window", 4096)] * count
    gemma = model_type == "gemma3_text"
    slides = gemma or keys.flag("use_sliding_window", False)
    if keys.has("layer_types"):
        kinds = keys.texts("layer_types", count)
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise keys.wrong(
                    "layer_types", f"may hold only 'full_attention' and 'sliding_attention', not {kind!r}"
                )
        local = [kind == "sliding_attention" for kind in kinds]
        if any(local) and not slides:
            raise keys.wrong("use_sliding_window", "must be true, because 'layer_types' has sliding layers")
    elif gemma:
        pattern = keys.integer("sliding_window_pattern", 6)
        local = [(index + 1) % pattern != 0 for index in range(count)]
    else:
        first = keys.integer("max_window_layers", 28, low=0)
        local = [slides and index >= first for index in range(count)]
    if not any(local):
        return [None] * count
    window = keys.integer("sliding_window", 4096)
    return [window if is_local else None for is_local in local]


def _ropes(keys: Keys, family: _Family, head_dim: int, max_positions: int) -> tuple[RopeSpec, RopeSpec]:
    """Rotary embeddings of the layers with the whole context and of those with a window."""
    if not family.gemma:
        rope = rope_from_hf(keys, dim=head_dim, max_positions=max_positions)
        return rope, rope
    base = keys.number("rope_theta", 1_000_000.0, low=1.0)
    local_base = keys.number("rope_local_base_freq", 10_000.0, low=1.0)
    if not keys.has("rope_parameters"):
        # rope_scaling stretches the global layers only: the others never look that far
        full = rope_from_hf(keys, dim=head_dim, max_positions=max_positions, base=base)
        return full, RopeSpec(local_base, head_dim)
    nested = keys.section("rope_parameters")
    ropes = []
    for kind, default in (("full_attention", base), ("sliding_attention", local_base)):
        if not nested.has(kind):
            raise nested.wrong(kind, "is missing")
        ropes.append(
            rope_of_section(
                nested.section(kind), keys, dim=head_dim, max_positions=max_positions, base=default
            )
        )
    return ropes[0], ropes[1]


def _stretched(rope: RopeSpec | None) -> int:
    """Positions that YaRN makes usable: its files often state only what the model was first trained on."""
    if rope is None or rope.scaling != "yarn":
        return 0
    return int(rope.original_max_positions * rope.factor)


def _cap(keys: Keys, key: str) -> float | None:
    return keys.number(key) if keys.has(key) else None
