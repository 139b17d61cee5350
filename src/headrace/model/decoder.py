"""The decoder-only transformer, defined once for every architecture and every backend."""

from __future__ import annotations

from typing import TypeVar

from headrace.model.architecture import Architecture, LayerSpec
from headrace.model.ops import Ops

T = TypeVar("T")


def decode(ops: Ops[T], arch: Architecture) -> None:
    """One step over a batch: token ids to sampled tokens."""
    x = ops.embed("embed", scale=arch.embedding_scale)
    for index, layer in enumerate(arch.layers):
        x = decode_layer(ops, x, layer, index)
    x = ops.norm(ops.logit_rows(x), "final_norm", arch.final_norm)
    logits = ops.linear(x, "embed" if arch.tied_head else "head", shard="vocab")
    if arch.logit_softcap is not None:
        logits = ops.softcap(logits, arch.logit_softcap)
    ops.sample(logits)


def decode_layer(ops: Ops[T], x: T, layer: LayerSpec, index: int) -> T:
    """The residual stream ``[rows, hidden]`` after one layer; its tensors are ``layers.{index}.…``."""
    return _feed_forward(ops, _attention(ops, x, layer, index), layer, index)


def _attention(ops: Ops[T], x: T, layer: LayerSpec, index: int) -> T:
    spec, name = layer.attention, f"layers.{index}.attention"
    h = ops.norm(x, f"{name}_norm", layer.norm)
    q = ops.linear(h, f"{name}.q", bias=spec.qkv_bias, shard="column")
    k = ops.linear(h, f"{name}.k", bias=spec.qkv_bias, shard="column")
    v = ops.linear(h, f"{name}.v", bias=spec.qkv_bias, shard="column")
    if spec.qk_norm is not None:
        q = ops.head_norm(q, f"{name}.q_norm", spec.qk_norm, heads=spec.heads)
        k = ops.head_norm(k, f"{name}.k_norm", spec.qk_norm, heads=spec.kv_heads)
    if spec.rope is not None:
        q = ops.rope(q, spec.rope, heads=spec.heads)
        k = ops.rope(k, spec.rope, heads=spec.kv_heads)
    h = ops.attention(q, k, v, spec, layer=index)
    h = ops.linear(h, f"{name}.o", bias=spec.out_bias, shard="row")
    if layer.post_norms:
        h = ops.norm(h, f"{name}_post_norm", layer.norm)
    return ops.add(x, h)


def _feed_forward(ops: Ops[T], x: T, layer: LayerSpec, index: int) -> T:
    spec, name = layer.feed_forward, f"layers.{index}.feed_forward"
    h = ops.norm(x, f"{name}_norm", layer.norm)
    gate = ops.linear(h, f"{name}.gate", bias=spec.bias, shard="column")
    up = ops.linear(h, f"{name}.up", bias=spec.bias, shard="column")
    h = ops.glu(gate, up, spec.activation)
    h = ops.linear(h, f"{name}.down", bias=spec.bias, shard="row")
    if layer.post_norms:
        h = ops.norm(h, f"{name}_post_norm", layer.norm)
    return ops.add(x, h)
