"""The tensors that an architecture calls for, by canonical name, and their shapes."""

from __future__ import annotations

from headrace.model.architecture import Architecture, LayerSpec

Shape = tuple[int, ...]


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every tensor that a checkpoint of ``architecture`` must hold; linear weights are ``[out, in]``."""
    hidden = architecture.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (architecture.vocab_size, hidden)}
    for index, layer in enumerate(architecture.layers):
        for name, shape in _layer_shapes(layer, hidden).items():
            shapes[f"layers.{index}.{name}"] = shape
    shapes["final_norm.weight"] = (hidden,)
    if not architecture.tied_head:
        shapes["head.weight"] = (architecture.vocab_size, hidden)
    return shapes


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    attention, width = layer.attention, layer.feed_forward.width
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes: dict[str, Shape] = {
        "attention_norm.weight": (hidden,),
        "attention.q.weight": (queries, hidden),
        "attention.k.weight": (keys, hidden),
        "attention.v.weight": (keys, hidden),
        "attention.o.weight": (hidden, queries),
        "feed_forward_norm.weight": (hidden,),
        "feed_forward.gate.weight": (width, hidden),
        "feed_forward.up.weight": (width, hidden),
        "feed_forward.down.weight": (hidden, width),
    }
    if attention.qkv_bias:
        shapes |= {
            f"attention.{part}.bias": (size,) for part, size in (("q", queries), ("k", keys), ("v", keys))
        }
    if attention.out_bias:
        shapes["attention.o.bias"] = (hidden,)
    if attention.qk_norm is not None:
        shapes |= {f"attention.{part}_norm.weight": (attention.head_dim,) for part in "qk"}
    if layer.post_norms:
        shapes |= {"attention_post_norm.weight": (hidden,), "feed_forward_post_norm.weight": (hidden,)}
    if layer.feed_forward.bias:
        shapes |= {"feed_forward.gate.bias": (width,), "feed_forward.up.bias": (width,)}
        shapes["feed_forward.down.bias"] = (hidden,)
    return shapes
