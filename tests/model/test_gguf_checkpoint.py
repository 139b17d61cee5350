"""GGUF models as checkpoints: what the metadata mean, and that the weights are the network's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.errors import ModelFormatError
from headrace.model.architecture import RopeSpec
from headrace.model.checkpoint import as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint
from tests.model.gguf_files import random_blocks, tiny_metadata, tiny_tensors, write_gguf

SIZES = (("q", 64), ("k", 32), ("v", 32))
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def opened(
    folder: Path, architecture: str = "llama", tensors: dict[str, Any] | None = None, **changes: Any
) -> GGUFCheckpoint:
    """A two-layer model with some of its metadata changed (None: removed), written and opened."""
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)
    stored = tiny_tensors(architecture) if tensors is None else tensors
    return GGUFCheckpoint(write_gguf(path, tiny_metadata(architecture, **changes), stored))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described_and_complete(family: str, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, family)
    arch = checkpoint.architecture
    assert (arch.family, arch.vocab_size, arch.hidden_size, arch.max_positions) == (family, 50, 64, 128)
    assert arch.tied_head
    assert len(arch.layers) == 2
    spec = arch.layers[0].attention
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.scale) == (4, 2, 16, 0.25)
    assert spec.qkv_bias == (family == "qwen2")
    assert (spec.qk_norm is not None) == (family in ("qwen3", "gemma3"))
    assert arch.layers[0].post_norms == (family == "gemma3")
    assert arch.layers[0].feed_forward.activation == ("gelu_tanh" if family == "gemma3" else "silu")
    assert arch.embedding_scale == (8.0 if family == "gemma3" else 1.0)
    assert math.isclose(arch.final_norm.eps, 1e-5, rel_tol=1e-6)
    assert len(checkpoint.names()) == len(tiny_tensors(family))
    for name in checkpoint.names():
        assert np.isfinite(as_float32(checkpoint.tensor(name))).all()


def test_names_are_in_file_order_and_values_are_the_files(tmp_path: Path) -> None:
    stored = tiny_tensors("qwen2")
    checkpoint = opened(tmp_path, "qwen2", stored)
    assert checkpoint.names()[:4] == (
        "embed.weight",
        "final_norm.weight",
        "layers.0.attention_norm.weight",
        "layers.0.feed_forward_norm.weight",
    )
    for name, expected in zip(checkpoint.names(), stored.values(), strict=True):
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_llama_rows_rotate_in_halves_as_they_did_in_pairs(rotary_dim: int, tmp_path: Path) -> None:
    """Attention scores with the stored rows and neighbouring pairs equal those with ours and half-splits."""
    stored = tiny_tensors("llama")
    rng = np.random.default_rng(7)
    stored |= {
        f"blk.{i}.attn_{p}.bias": rng.normal(size=n).astype(np.float32) for i in (0, 1) for p, n in SIZES
    }
    checkpoint = opened(tmp_path, "llama", stored, rope__dimension_count=rotary_dim)
    rope = checkpoint.architecture.layers[0].attention.rope
    assert rope is not None
    angles = np.outer([3, 11], rope.inverse_frequencies())  # two positions
    x = rng.normal(size=(2, 64))

    def scores(weights: dict[str, np.ndarray], pairs: bool) -> np.ndarray:
        heads = []
        for part, count in (("q", 4), ("k", 2)):
            y = x @ weights[f"{part}.weight"].T + weights[f"{part}.bias"]
            y = y.reshape(2, count, 16)
            first, second = (
                (np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2))
                if pairs
                else (np.arange(rotary_dim // 2), np.arange(rotary_dim // 2, rotary_dim))
            )
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            out = y.copy()
            out[..., first] = y[..., first] * cos - y[..., second] * sin
            out[..., second] = y[..., second] * cos + y[..., first] * sin
            heads.append(out)
        return np.einsum("qhd,khd->hqk", heads[0], np.repeat(heads[1], 2, axis=1))

    theirs = {f"{p}.{kind}": stored[f"blk.1.attn_{p}.{kind}"] for p in "qk" for kind in ("weight", "bias")}
    ours = {
        f"{p}.{kind}": np.asarray(checkpoint.tensor(f"layers.1.attention.{p}.{kind}"))
        for p in "qk"
        for kind in ("weight", "bias")
    }
    assert checkpoint.architecture.layers[0].attention.qkv_bias
    np.testing.assert_allclose(scores(ours, pairs=False), scores(theirs, pairs=True), rtol=1e-6)
    np.testing.assert_array_equal(  # v has no rotation and keeps its order
        checkpoint.tensor("layers.1.attention.v.weight"), stored["blk.1.attn_v.weight"]
    )


def test_quantised_rows_are_permuted_like_dense_ones(tmp_path: Path) -> None:
    stored: dict[str, Any] = tiny_tensors()
    dense = opened(tmp_path, tensors=stored)
    ours = as_float32(dense.tensor("layers.0.attention.q.weight"))
    order = [int(np.flatnonzero((stored["blk.0.attn_q.weight"] == row).all(axis=1))[0]) for row in ours]
    assert order != sorted(order)
    packed = random_blocks(np.random.default_rng(8), "Q4_1", 64, 64)
    (tmp_path / "quantised").mkdir()
    checkpoint = opened(tmp_path / "quantised", tensors=stored | {"blk.0.attn_q.weight": ("Q4_1", packed)})
    as_stored = checkpoint.file.tensor("blk.0.attn_q.weight")
    permuted = checkpoint.tensor("layers.0.attention.q.weight")
    assert isinstance(as_stored, QuantTensor)
    assert isinstance(permuted, QuantTensor)
    np.testing.assert_array_equal(permuted.dequantize(), as_stored.dequantize()[order])


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    head = np.full((50, 64), 0.5, np.float32)
    checkpoint = opened(tmp_path, tensors=tiny_tensors() | {"output.weight": head})
    assert not checkpoint.architecture.tied_head
    np.testing.assert_array_equal(checkpoint.tensor("head.weight"), head)


def test_gemma_alternates_local_and_global_layers(tmp_path: Path) -> None:
    """Files name neither the pattern nor the local base: five local layers, base 10,000, then one global."""
    tensors = tiny_tensors("gemma3", layers=7)
    arch = opened(tmp_path, "gemma3", tensors, block_count=7, rope__freq_base=1e6).architecture
    specs = [layer.attention for layer in arch.layers]
    assert [spec.window for spec in specs] == [32] * 5 + [None, 32]
    assert [spec.rope.base for spec in specs if spec.rope] == [1e4] * 5 + [1e6, 1e4]
    assert [group.layers for group in arch.kv_groups] == [(0, 1, 2, 3, 4, 6), (5,)]
    named = opened(
        tmp_path,
        "gemma3",
        tensors,
        block_count=7,
        attention__sliding_window_pattern=2,
        rope__freq_base_swa=5e3,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    ).architecture
    specs = [layer.attention for layer in named.layers]
    assert [spec.window for spec in specs] == [32, None, 32, None, 32, None, 32]
    assert specs[0].rope == RopeSpec(5e3, 16)  # local layers are never scaled
    assert specs[1].rope == RopeSpec(1e4, 16, "linear", 8.0)
    listed = opened(
        tmp_path,
        "gemma3",
        tensors,
        block_count=7,
        attention__sliding_window_pattern=[True, False] + [True] * 5,
    ).architecture
    assert [layer.attention.window for layer in listed.layers] == [32, None] + [32] * 5


def test_mistral_slides_everywhere_and_qwen_nowhere(tmp_path: Path) -> None:
    arch = opened(tmp_path, attention__sliding_window=64).architecture
    assert [layer.attention.window for layer in arch.layers] == [64, 64]
    arch = opened(tmp_path, attention__sliding_window=128).architecture  # as long as the context: no window
    assert [layer.attention.window for layer in arch.layers] == [None, None]
    arch = opened(tmp_path, "qwen2", attention__sliding_window=64).architecture
    assert [layer.attention.window for layer in arch.layers] == [None, None]


def test_llama3_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    """Llama 3's scaling is stored as one divisor per frequency; they give the formula's frequencies."""
    formula = RopeSpec(500_000.0, 16, "llama3", 32.0, 8192, 1.0, 4.0)
    plain = RopeSpec(500_000.0, 16)
    divisors = np.divide(plain.inverse_frequencies(), formula.inverse_frequencies()).astype(np.float32)
    assert divisors.min() == 1
    assert divisors.max() == 32
    tensors = tiny_tensors() | {"rope_freqs.weight": divisors}
    checkpoint = opened(tmp_path, tensors=tensors, rope__freq_base=500_000.0)
    rope = checkpoint.architecture.layers[1].attention.rope
    assert rope is not None
    np.testing.assert_allclose(rope.inverse_frequencies(), formula.inverse_frequencies(), rtol=1e-6)
    assert "rope_freqs" not in " ".join(checkpoint.names())


def test_rope_scaling_keys(tmp_path: Path) -> None:
    def rope(**changes: Any) -> RopeSpec | None:
        return opened(tmp_path, "qwen2", **changes).architecture.layers[0].attention.rope

    plain = RopeSpec(1e4, 16)
    assert rope(rope__freq_base=None) == plain
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0) == plain
    assert rope(rope__scaling__factor=4.0) == RopeSpec(1e4, 16, "linear", 4.0)
    assert rope(rope__scale_linear=2.0) == RopeSpec(1e4, 16, "linear", 2.0)
    kept = opened(tmp_path, "qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert kept.architecture.max_positions == 4 * 128
    yarn = rope(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
    )
    assert yarn == RopeSpec(
        1e4, 16, "yarn", 4.0, original_max_positions=32, attention_factor=1 + 0.1 * math.log(4)
    )
    with pytest.raises(ModelFormatError, match=r"rope\.scaling\.type is 'longrope'"):
        rope(rope__scaling__type="longrope", rope__scaling__factor=4.0)


def test_sizes_may_be_given_per_layer(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors |= {f"blk.1.attn_{p}.weight": np.ones((64, 64), np.float32) for p in "kv"}
    arch = opened(tmp_path, tensors=tensors, attention__head_count_kv=[2, 4]).architecture
    assert [layer.attention.kv_heads for layer in arch.layers] == [2, 4]
    assert [(group.layers, group.kv_heads) for group in arch.kv_groups] == [((0,), 2), ((1,), 4)]


BAD_KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("llama", {"embedding_length": None}, "llama.embedding_length is missing"),
    "no epsilon": ("llama", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "zero": ("llama", {"attention.head_count": 0}, "head_count is 0; it must be a whole number, 1 to"),
    "absurd": ("llama", {"embedding_length": 2**32 - 1}, "embedding_length is 4294967295"),
    "absurd layers": ("llama", {"block_count": 2**32 - 1}, "block_count is 4294967295"),
    "absurd context": ("llama", {"context_length": 2**32 - 1}, "context_length is 4294967295"),
    "a string": ("llama", {"block_count": "two"}, "block_count is 'two'; it must be a whole number"),
    "a float": ("llama", {"block_count": 2.0}, "block_count is 2.0"),
    "a bool": ("llama", {"block_count": True}, "block_count is True"),
    "an array": ("llama", {"block_count": [2, 2]}, "block_count is an array; it must be a single value"),
    "too few per layer": ("llama", {"attention.head_count_kv": [2]}, "head_count_kv must have .*each of 2"),
    "zero in a layer": ("llama", {"attention.head_count_kv": [2, 0]}, "head_count_kv must have"),
    "floats per layer": ("llama", {"feed_forward_length": [96.0, 96.0]}, "feed_forward_length must have"),
    "heads do not group": ("llama", {"attention.head_count_kv": 3}, "4 heads, no multiple of 3"),
    "heads do not divide": ("llama", {"attention.head_count": 5}, "64 is no multiple of .*5"),
    "odd rotary": ("llama", {"rope.dimension_count": 15}, "rope.dimension_count 15 must be even"),
    "long rotary": ("llama", {"rope.dimension_count": 32}, "rope.dimension_count 32"),
    "value differs": ("llama", {"attention.key_length": 16, "attention.value_length": 8}, "differ"),
    "NaN": ("llama", {"rope.freq_base": math.nan}, "rope.freq_base is nan; it must be a number above 1"),
    "infinite": ("llama", {"rope.freq_base": math.inf}, "rope.freq_base is inf"),
    "negative": ("llama", {"attention.layer_norm_rms_epsilon": -1e-5}, "epsilon is -9.99"),
    "epsilon text": ("llama", {"attention.layer_norm_rms_epsilon": "1e-5"}, "epsilon is '1e-5'"),
    "base 1": ("llama", {"rope.freq_base": 1.0}, "rope.freq_base is 1.0"),
    "yarn shrinks": ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5}, "0.5; yarn extends"),
    "no window": ("gemma3", {"attention.sliding_window": None}, "gemma3.attention.sliding_window is missing"),
    "bad pattern": ("gemma3", {"attention.sliding_window_pattern": [True]}, "one bool for each of 2 layers"),
    "zero pattern": ("gemma3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    "experts": ("llama", {"expert_count": 8}, "mixture of experts"),
    "encoder": ("qwen3", {"attention.causal": False}, "not causal"),
    "vocabulary": ("llama", {"vocab_size": 51}, r"token_embd.weight has shape \[50, 64\].*\[51, 64\]"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_metadata_that_cannot_be_right_are_named(case: str, tmp_path: Path) -> None:
    family, changes, message = BAD_KEYS[case]
    with pytest.raises(ModelFormatError, match=message):
        opened(tmp_path, family, **changes)


WRONG: dict[str, Any] = {
    **{"zero": 0, "one": 1, "three": 3, "most": 2**32 - 1, "half": 0.5, "NaN": math.nan, "minus": -1.0},
    **{
        "false": False,
        "text": "text",
        "texts": ["a", "b"],
        "numbers": [1, 2],
        "zeros": [0.0, 0.0],
        "yes": [True],
    },
}
READ_KEYS = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_ext_factor",
]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("wrong", WRONG)
def test_any_value_in_any_key_is_survived(family: str, wrong: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(family)
    for key in READ_KEYS:
        yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0} if "yarn" in key else {}
        try:
            checkpoint = opened(tmp_path, family, tensors, **yarn, **{key: WRONG[wrong]})
        except ModelFormatError:
            continue
        for layer in checkpoint.architecture.layers:
            assert layer.attention.rope is not None
            assert np.isfinite(layer.attention.rope.inverse_frequencies()).all()


@pytest.mark.parametrize("key", ["general.architecture", "split.count", "tokenizer.ggml.tokens"])
@pytest.mark.parametrize("wrong", WRONG)
def test_any_value_in_a_general_key_is_survived(key: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    value = WRONG[wrong]
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    kinds |= {str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, kinds[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError):
        GGUFCheckpoint(path)


def test_unknown_architectures_hear_what_is_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"}, tiny_tensors())
    with pytest.raises(ModelFormatError, match="'mamba'; headrace runs llama, qwen2, qwen3, gemma3"):
        GGUFCheckpoint(path)


def test_parts_of_a_split_model_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata() | {"split.count": 3}, tiny_tensors())
    with pytest.raises(ModelFormatError, match="one of 3 parts; merge them first"):
        GGUFCheckpoint(path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": [f"t{number}" for number in range(51)]}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata() | tokens, tiny_tensors())
    with pytest.raises(ModelFormatError, match="tokenizer has 51 tokens, but its vocabulary only 50"):
        GGUFCheckpoint(path)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    whole = tiny_tensors("qwen2")

    def refused(tensors: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelFormatError, match=message):
            opened(tmp_path, "qwen2", tensors)

    refused(
        {k: v for k, v in whole.items() if k != "blk.1.attn_k.bias"}, r"blk\.1\.attn_k\.bias is missing\."
    )
    refused({k: v for k, v in whole.items() if "blk.1" not in k}, r"missing \(and 11 more\)")
    refused({k: v for k, v in whole.items() if "embd" not in k}, "token_embd.weight is missing")
    refused(whole | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "attn_sinks.weight has no place")
    refused(
        whole | {"blk.0.ffn_up.weight": whole["blk.0.ffn_up.weight"].T.copy()},
        r"ffn_up.*\[64, 96\].*\[96, 64\]",
    )
    norm = random_blocks(np.random.default_rng(9), "Q8_0", 1, 64)[0]
    refused(whole | {"output_norm.weight": ("Q8_0", norm)}, "output_norm.weight is Q8_0; norms")
    with pytest.raises(ModelFormatError, match=r"rope_freqs\.weight must hold positive"):
        opened(tmp_path, tensors=tiny_tensors() | {"rope_freqs.weight": np.zeros(8, np.float32)})
    with pytest.raises(ModelFormatError, match=r"rope_freqs\.weight is F32 \[4\]"):
        opened(tmp_path, tensors=tiny_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)})


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no tensor layers\.9\.attention\.q\.weight"):
        opened(tmp_path).tensor("layers.9.attention.q.weight")


def test_quantization_narrows_float_matrices_only(tmp_path: Path) -> None:
    packed = random_blocks(np.random.default_rng(10), "Q5_1", 96, 64)
    tensors = tiny_tensors() | {"blk.0.ffn_up.weight": ("Q5_1", packed)}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors)
    plain, narrowed = open_checkpoint(path), open_checkpoint(path, quantization="int4")
    bits = {}
    for name in narrowed.names():
        tensor = narrowed.tensor(name)
        bits[name] = tensor.bits if isinstance(tensor, QuantTensor) else None
        np.testing.assert_allclose(as_float32(tensor), as_float32(plain.tensor(name)), atol=0.05)
    assert bits["layers.0.feed_forward.up.weight"] == 5
    assert bits["layers.0.feed_forward.gate.weight"] == 4
    assert bits["embed.weight"] == 8
    assert bits["layers.0.attention_norm.weight"] is None


def test_fingerprints_tell_sources_and_settings_apart(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", tiny_metadata(), tiny_tensors())
    second = write_gguf(tmp_path / "b.gguf", tiny_metadata(), tiny_tensors())
    prints = [open_checkpoint(first), open_checkpoint(second), open_checkpoint(first, quantization="int8")]
    assert len({checkpoint.fingerprint() for checkpoint in prints}) == 3
    assert open_checkpoint(first).fingerprint() == open_checkpoint(first).fingerprint()
    again = open_checkpoint(first).fingerprint()
    first.write_bytes(first.read_bytes())  # same bytes, written again
    assert open_checkpoint(first).fingerprint() != again
