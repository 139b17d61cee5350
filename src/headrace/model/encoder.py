"""The bidirectional encoder with post-layernorm (BERT), defined once for every backend."""

from __future__ import annotations

from typing import TypeVar

from headrace.model.architecture import Architecture, EncoderSpec, LayerSpec
from headrace.model.ops import Ops

T = TypeVar("T")


def encode(ops: Ops[T], arch: Architecture, encoder: EncoderSpec) -> None:
    """One step over whole sequences: token ids to one vector each. ``encoder`` is ``arch.encoder``."""
    x = ops.embed("embed", scale=arch.embedding_scale)
    x = ops.add(x, ops.embed("position_embed", scale=1.0, by="position"))
    x = ops.norm(x, "embed_norm", arch.final_norm)
    for index, layer in enumerate(arch.layers):
        x = _attention(ops, x, layer, index)
        x = _feed_forward(ops, x, layer, index)
    ops.pool(x, encoder)


def _attention(ops: Ops[T], x: T, layer: LayerSpec, index: int) -> T:
    spec, name = layer.attention, f"layers.{index}.attention"
    q = ops.linear(x, f"{name}.q", bias=spec.qkv_bias, shard="column")
    k = ops.linear(x, f"{name}.k", bias=spec.qkv_bias, shard="column")
    v = ops.linear(x, f"{name}.v", bias=spec.qkv_bias, shard="column")
    h = ops.attention(q, k, v, spec, layer=index)
    h = ops.linear(h, f"{name}.o", bias=spec.out_bias, shard="row")
    return ops.norm(ops.add(x, h), f"{name}_norm", layer.norm)


def _feed_forward(ops: Ops[T], x: T, layer: LayerSpec, index: int) -> T:
    spec, name = layer.feed_forward, f"layers.{index}.feed_forward"
    h = ops.linear(x, f"{name}.up", bias=spec.bias, shard="column")
    h = ops.activate(h, spec.activation)
    h = ops.linear(h, f"{name}.down", bias=spec.bias, shard="row")
    return ops.norm(ops.add(x, h), f"{name}_norm", layer.norm)
