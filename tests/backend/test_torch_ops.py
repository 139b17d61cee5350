"""Each operation of TorchOps by itself, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Batch
from headrace.backend.torch.kv import TorchKV
from headrace.backend.torch.ops import TorchOps
from headrace.backend.torch.step import TorchStep
from headrace.model.architecture import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from tests.backend.batches import Piece, batch_of, single_batch

Float64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


def ops_for(
    batch: Batch, weights: dict[str, NDArray[np.float32]] | None = None, kv: TorchKV | None = None
) -> TorchOps:
    tensors = {name: torch.tensor(value) for name, value in (weights or {}).items()}
    return TorchOps(tensors, kv or TorchKV([], 0), TorchStep.from_batch(batch))


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def close(got: torch.Tensor, expected: NDArray[np.float32] | Float64) -> None:
    np.testing.assert_allclose(got.numpy(), expected, atol=2e-6, rtol=2e-6)


def test_embed_looks_up_and_scales() -> None:
    table = normal(20, 8)
    ops = ops_for(single_batch([3, 0, 19], 0, [0]), {"embed.weight": table})
    close(ops.embed("embed", scale=1.0), table[[3, 0, 19]])
    close(ops.embed("embed", scale=2.5), table[[3, 0, 19]] * 2.5)


def test_norms() -> None:
    x, weight, bias = normal(3, 24), normal(24), normal(24)
    ops = ops_for(
        single_batch([1, 2, 3], 0, [0]), {"n.weight": weight, "n.bias": bias, "h.weight": weight[:8]}
    )
    wide = x.astype(np.float64)
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    close(ops.norm(torch.tensor(x), "n", NormSpec("rms", 1e-3)), rms * weight)
    centred = wide - wide.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * weight + bias
    close(ops.norm(torch.tensor(x), "n", NormSpec("layer", 1e-3)), layer)
    heads = wide.reshape(3, 3, 8)
    each = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-3) * weight[:8]
    close(ops.head_norm(torch.tensor(x), "h", NormSpec("rms", 1e-3), heads=3), each.reshape(3, 24))


def test_linear_with_and_without_bias() -> None:
    x, weight, bias = normal(2, 5), normal(3, 5), normal(3)
    ops = ops_for(single_batch([1, 2], 0, [0]), {"l.weight": weight, "l.bias": bias})
    close(ops.linear(torch.tensor(x), "l"), x @ weight.T)
    close(ops.linear(torch.tensor(x), "l", bias=True, shard="row"), x @ weight.T + bias)


@pytest.mark.parametrize("dim", [8, 4])
def test_rope_turns_pairs_by_position(dim: int) -> None:
    """As complex numbers: feature i and i + dim/2 turn by position * frequency; the rest stays."""
    x = normal(3, 2 * 8)
    spec = RopeSpec(100.0, dim, attention_factor=1.25)
    ops = ops_for(single_batch([1, 2, 3], 30, [0, 1, 2]))
    heads = x.reshape(3, 2, 8).astype(np.float64)
    half = dim // 2
    turns = np.exp(1j * np.arange(30, 33)[:, None, None] * 100.0 ** (-2 * np.arange(half) / dim))
    pairs = (heads[..., :half] + 1j * heads[..., half:dim]) * turns * 1.25
    expected = np.concatenate([pairs.real, pairs.imag, heads[..., dim:]], -1)
    close(ops.rope(torch.tensor(x), spec, heads=2), expected.reshape(3, 16))


def test_rope_far_out_is_exact() -> None:
    """At position 100,000 a float32 angle would be off by thousandths of a radian."""
    spec = RopeSpec(10000.0, 2)
    ops = TorchOps(
        {},
        TorchKV([], 0),
        TorchStep(torch.tensor([0]), torch.tensor([100_003]), [0, 1], [100_004], (), (), torch.tensor([0])),
    )
    close(
        ops.rope(torch.tensor([[1.0, 0.0]]), spec, heads=1),
        np.array([[math.cos(100_003), math.sin(100_003)]]),
    )


def test_glu_activations_and_add() -> None:
    gate, up = normal(2, 6), normal(2, 6)
    ops = ops_for(single_batch([1, 2], 0, [0]))
    wide = gate.astype(np.float64)
    erf = np.vectorize(math.erf)
    expected: dict[Activation, Float64] = {
        "silu": wide / (1 + np.exp(-wide)),
        "gelu": wide * 0.5 * (1 + erf(wide / math.sqrt(2))),
        "gelu_tanh": wide * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))),
    }
    for activation, value in expected.items():
        close(ops.glu(torch.tensor(gate), torch.tensor(up), activation), value * up)
    close(ops.add(torch.tensor(gate), torch.tensor(up)), gate + up)


def test_logit_rows_softcap_and_sample() -> None:
    x = normal(5, 4)
    pieces = [Piece([1, 2, 3], 0, [0]), Piece([4, 5], 0, [1])]
    ops = ops_for(batch_of(pieces))
    rows = ops.logit_rows(torch.tensor(x))
    close(rows, x[[2, 4]])
    capped = ops.softcap(rows, 0.5)
    close(capped, 0.5 * np.tanh(x[[2, 4]].astype(np.float64) / 0.5))
    assert ops.output is None
    ops.sample(capped)
    assert ops.output is capped


def layer_of(attention: AttentionSpec, group: int = 0) -> LayerSpec:
    return LayerSpec(attention, FeedForwardSpec(8), NormSpec(), kv_group=group)


def plain_attention(q: Float64, k: Float64, v: Float64, spec: AttentionSpec) -> Float64:
    """One whole sequence, one query and head at a time."""
    out = np.zeros((len(q), spec.heads, spec.head_dim))
    for position in range(len(q)):
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.heads):
            kv_head = head // (spec.heads // spec.kv_heads)
            scores = k[first : position + 1, kv_head] @ q[position, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ v[first : position + 1, kv_head]
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_attention(window: int | None, softcap: float | None, heads: int, kv_heads: int) -> None:
    """Chunked queries over scattered blocks; the blocks that no window reaches are poisoned on the way."""
    spec = AttentionSpec(heads, kv_heads, 8, None, 0.4, window=window, softcap=softcap)
    length = 53
    q, k, v = normal(length, heads * 8), normal(length, kv_heads * 8), normal(length, kv_heads * 8)
    kv = TorchKV([layer_of(spec)], 9)
    blocks = [7, 2, 5, 0]
    got = []
    for start, end in ((0, 20), (20, 21), (21, 40), (40, 53)):
        visible = list(blocks)
        if window is not None:
            for block in range(max(0, start - window + 1) // BLOCK_SIZE):
                visible[block] = -1
        ops = ops_for(single_batch([0] * (end - start), start, visible), kv=kv)
        part = [torch.tensor(x[start:end]) for x in (q, k, v)]
        got.append(ops.attention(*part, spec, layer=0).numpy())
    wide = [x.astype(np.float64).reshape(length, -1, 8) for x in (q, k, v)]
    np.testing.assert_allclose(np.concatenate(got), plain_attention(*wide, spec), atol=2e-6, rtol=1e-5)


def test_attention_keeps_sequences_layers_and_groups_apart() -> None:
    """Two layers in two KV groups with different block tables; two sequences, one of them idle this step."""
    whole = AttentionSpec(2, 2, 4, None, 0.5)
    local = AttentionSpec(2, 2, 4, None, 0.5, window=3)
    kv = TorchKV([layer_of(whole, 0), layer_of(local, 1)], 6)
    batch = batch_of([Piece([0] * 18, 0, [0, 1]), Piece([], 5, [4]), Piece([0] * 4, 0, [2])], num_groups=2)
    other = batch_of([Piece([0] * 18, 0, [3, 5]), Piece([], 5, [4]), Piece([0] * 4, 0, [1])])
    batch.slot_mapping = (batch.slot_mapping[0], other.slot_mapping[0])
    batch.block_tables = (batch.block_tables[0], other.block_tables[0])
    ops = ops_for(batch, kv=kv)
    inputs = {layer: [normal(22, 8) for _ in range(3)] for layer in (0, 1)}
    got = {}
    for layer, spec in ((0, whole), (1, local)):
        got[layer] = ops.attention(*map(torch.tensor, inputs[layer]), spec, layer=layer).numpy()
    for layer, spec in ((0, whole), (1, local)):
        for rows in (slice(0, 18), slice(18, 22)):
            wide = [x[rows].astype(np.float64).reshape(-1, 2, 4) for x in inputs[layer]]
            np.testing.assert_allclose(got[layer][rows], plain_attention(*wide, spec), atol=2e-6, rtol=1e-5)
