"""Which tensors an architecture needs, by canonical name, and their shapes."""

from __future__ import annotations

from headrace.model.architecture import Architecture, LayerSpec


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape of every tensor of the network, embedding first, head last.

    Linear weights are ``[out, in]``. A checkpoint with other tensors or shapes is not of this architecture.
    """
    hidden = architecture.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (architecture.vocab_size, hidden)}
    for index, layer in enumerate(architecture.layers):
        for name, shape in _layer_shapes(layer, hidden).items():
            shapes[f"layers.{index}.{name}"] = shape
    if architecture.encoder is not None:
        shapes["position_embed.weight"] = (architecture.max_positions, hidden)
        return shapes | _norm_shapes("embed_norm", architecture.final_norm.kind, hidden)
    shapes |= _norm_shapes("final_norm", architecture.final_norm.kind, hidden)
    if not architecture.tied_head:
        shapes["head.weight"] = (architecture.vocab_size, hidden)
    return shapes


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    attention, feed_forward = layer.attention, layer.feed_forward
    q_width = attention.heads * attention.head_dim
    kv_width = attention.kv_heads * attention.head_dim
    shapes = _norm_shapes("attention_norm", layer.norm.kind, hidden)
    linears = [
        ("attention.q", q_width, hidden, attention.qkv_bias),
        ("attention.k", kv_width, hidden, attention.qkv_bias),
        ("attention.v", kv_width, hidden, attention.qkv_bias),
        ("attention.o", hidden, q_width, attention.out_bias),
        ("feed_forward.up", feed_forward.width, hidden, feed_forward.bias),
        ("feed_forward.down", hidden, feed_forward.width, feed_forward.bias),
    ]
    if feed_forward.gated:
        linears.append(("feed_forward.gate", feed_forward.width, hidden, feed_forward.bias))
    for name, out, into, bias in linears:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if attention.qk_norm is not None:
        shapes |= _norm_shapes("attention.q_norm", attention.qk_norm.kind, attention.head_dim)
        shapes |= _norm_shapes("attention.k_norm", attention.qk_norm.kind, attention.head_dim)
    shapes |= _norm_shapes("feed_forward_norm", layer.norm.kind, hidden)
    if layer.post_norms:
        shapes |= _norm_shapes("attention_post_norm", layer.norm.kind, hidden)
        shapes |= _norm_shapes("feed_forward_post_norm", layer.norm.kind, hidden)
    return shapes


def _norm_shapes(name: str, kind: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
    if kind == "layer":
        shapes[f"{name}.bias"] = (width,)
    return shapes
