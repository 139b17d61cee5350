"""config.json to Architecture: shapes of real models, defaults, both generations of keys, bad input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.torch import reference_logits
from headrace.errors import ModelFormatError
from headrace.model.architecture import RopeSpec
from headrace.model.weights.hf_config import architecture_from_hf
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.model.tiny import CASES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GEMMA: dict[str, Any] = {  # as sparse as the multimodal releases' text_config
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen2(**changes: Any) -> dict[str, Any]:
    return {**SMALL, "model_type": "qwen2", **changes}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in architecture_from_hf(config).layers]


def groups(config: dict[str, Any]) -> list[int]:
    return [layer.kv_group for layer in architecture_from_hf(config).layers]


def test_llama3() -> None:
    arch = architecture_from_hf(LLAMA)
    attention = arch.layers[0].attention
    assert (arch.family, arch.vocab_size, arch.hidden_size, len(arch.layers)) == ("llama", 128256, 4096, 4)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (32, 8, 128)
    assert attention.scale == pytest.approx(128**-0.5)
    assert attention.rope == RopeSpec(
        500000.0, 128, "llama3", factor=8.0, original_max_positions=8192, low_freq_factor=1.0
    )
    assert (arch.layers[0].feed_forward.width, arch.layers[0].feed_forward.activation) == (14336, "silu")
    assert arch.final_norm.eps == 1e-5
    assert arch.max_positions == 131072
    assert not arch.tied_head
    assert groups(LLAMA) == [0, 0, 0, 0]
    assert len(arch.kv_groups) == 1


def test_gemma3_takes_the_defaults_of_transformers() -> None:
    arch = architecture_from_hf(GEMMA)
    local, whole = arch.layers[0].attention, arch.layers[5].attention
    assert (local.heads, local.kv_heads, local.head_dim, arch.vocab_size) == (8, 4, 256, 262208)
    assert [layer.attention.window for layer in arch.layers] == [1024] * 5 + [None] + [1024] * 2
    assert local.rope == RopeSpec(10000.0, 256)
    assert whole.rope == RopeSpec(1000000.0, 256, "linear", factor=8.0)
    assert local.scale == 1 / 16
    assert arch.embedding_scale == pytest.approx(2560**0.5)
    assert arch.tied_head
    assert arch.logit_softcap is None
    assert all(layer.post_norms and layer.attention.qk_norm for layer in arch.layers)
    assert arch.layers[0].feed_forward.activation == "gelu_tanh"
    assert groups(GEMMA) == [0] * 5 + [1] + [0] * 2


def test_gemma3_multimodal_is_its_text_config() -> None:
    outer = {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"hidden_size": 1152}}
    assert architecture_from_hf(outer) == architecture_from_hf(GEMMA)
    untied = {**outer, "tie_word_embeddings": False}
    assert not architecture_from_hf(untied).tied_head


def test_gemma3_caps_and_pattern() -> None:
    config = {
        **GEMMA,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "sliding_window_pattern": 2,
    }
    arch = architecture_from_hf(config)
    assert arch.logit_softcap == 30.0
    assert arch.layers[0].attention.softcap == 50.0
    assert windows(config) == [1024, None] * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**SMALL, "model_type": "mistral"}, [4096] * 3),
        ({**SMALL, "model_type": "mistral", "sliding_window": None}, [None] * 3),
        ({**SMALL, "model_type": "llama", "sliding_window": 512}, [None] * 3),
        (qwen2(sliding_window=512), [None] * 3),
        (qwen2(sliding_window=512, use_sliding_window=True), [None] * 3),
        (qwen2(sliding_window=512, use_sliding_window=True, max_window_layers=1), [None, 512, 512]),
        (
            qwen2(use_sliding_window=True, layer_types=["sliding_attention"] + ["full_attention"] * 2),
            [4096, None, None],
        ),
    ],
)
def test_windows(config: dict[str, Any], expected: list[int | None]) -> None:
    """Which layers look how far back: the families disagree on keys and defaults."""
    assert windows(config) == expected


def test_biases_and_norms_by_family() -> None:
    small = architecture_from_hf(qwen2()).layers[0].attention
    assert (small.qkv_bias, small.out_bias, small.qk_norm) == (True, False, None)
    qwen3 = architecture_from_hf({**SMALL, "model_type": "qwen3"}).layers[0].attention
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.head_dim) == (False, False, 128)
    assert qwen3.qk_norm is not None
    biased = architecture_from_hf({**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True})
    attention = biased.layers[0].attention
    assert (attention.qkv_bias, attention.out_bias, biased.layers[0].feed_forward.bias) == (True, True, True)


def test_null_kv_heads_means_no_grouping() -> None:
    """``null`` is not the absent key: Mistral's default of 8 must not split 4 heads."""
    config = {**SMALL, "model_type": "mistral", "num_key_value_heads": None}
    assert architecture_from_hf(config).layers[0].attention.kv_heads == 4


def test_yarn_states_its_stretched_context() -> None:
    """Qwen2.5's recipe leaves max_position_embeddings at what the model was trained on."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    arch = architecture_from_hf(qwen2(max_position_embeddings=32768, rope_scaling=scaling))
    rope = arch.layers[0].attention.rope
    assert arch.max_positions == 131072
    assert rope is not None
    assert (rope.scaling, rope.beta_fast, rope.beta_slow) == ("yarn", 32.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)


def to_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration in the keys of transformers 4."""
    old = copy.deepcopy(config)
    rope = old.pop("rope_parameters")
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        old["rope_scaling"] = rope
    return old


@pytest.mark.parametrize("name", [name for name in CASES if name != "gemma3-multimodal"])
def test_old_keys_mean_what_the_new_ones_mean(name: str, tmp_path: Path) -> None:
    CASES[name](tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = to_transformers_4(new)
    assert "rope_parameters" not in old
    assert architecture_from_hf(old) == architecture_from_hf(new)


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "gemma3"])
def test_old_keys_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    CASES[name](tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_transformers_4(json.loads(path.read_text()))))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = list(range(3, 60))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt])).logits[0].numpy()
    got = reference_logits(SafetensorsCheckpoint(tmp_path), prompt)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


LLAMA3_ROPE = LLAMA["rope_scaling"]
BAD = [
    ({"model_type": None}, "model_type"),
    ({"model_type": 5}, "model_type"),
    ({"model_type": "mamba"}, "model_type"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "4096"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 4095}, "hidden_size"),
    ({"hidden_size": 10**30}, "hidden_size"),
    ({"hidden_size": 10**5000}, "hidden_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": -5}, "vocab_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"intermediate_size": []}, "intermediate_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size"),
    ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ({"head_dim": 127}, "head_dim"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_theta": 1.0}, "rope_theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "relu"}, "hidden_act"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"attention_bias": 1}, "attention_bias"),
    ({"max_position_embeddings": 2.5}, "max_position_embeddings"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "rope_scaling.rope_type"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling.type"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False}}, "rope_scaling.truncate"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1}}, "rope_scaling.beta_fast"),
    ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
    ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": None}}, "rope_scaling.low_freq_factor"),
    (
        {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": "8k"}},
        "rope_scaling.original_max_position_embeddings",
    ),
]


@pytest.mark.parametrize(("changes", "key"), BAD)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        architecture_from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**GEMMA, "layer_types": ["full_attention"]}, "layer_types"),
        ({**GEMMA, "layer_types": "full_attention"}, "layer_types"),
        ({**GEMMA, "layer_types": ["chunked_attention"] * 8}, "layer_types"),
        ({**GEMMA, "sliding_window": 0}, "sliding_window"),
        ({**GEMMA, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({**GEMMA, "final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.full_attention"),
        ({"model_type": "gemma3", "text_config": None}, "text_config"),
        ({"model_type": "gemma3", "text_config": {**GEMMA, "hidden_size": None}}, "text_config.hidden_size"),
        ({"model_type": "gemma3", "text_config": {**GEMMA, "model_type": "llava"}}, "text_config.model_type"),
        (qwen2(layer_types=["sliding_attention"] * 3), "use_sliding_window"),
    ],
)
def test_bad_values_of_windowed_families(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"'{key}'"):
        architecture_from_hf(config)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="JSON object"):
        architecture_from_hf([])  # type: ignore[arg-type]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([LLAMA, GEMMA, qwen2(use_sliding_window=True)]), st.data())
def test_any_value_anywhere_is_accepted_or_refused(base: dict[str, Any], data: st.DataObject) -> None:
    """No value of any key may raise anything but ModelFormatError."""
    key = data.draw(st.sampled_from(sorted({*base, "rope_parameters", "layer_types", "head_dim"})))
    config = {**base, key: data.draw(_JSON)}
    if isinstance(base.get(key), dict):
        inner = data.draw(st.sampled_from(sorted({*base[key], "attention_factor", "mscale"})))
        config[key] = {**base[key], inner: data.draw(_JSON)}
    try:
        arch = architecture_from_hf(config)
    except ModelFormatError:
        return
    for layer in arch.layers:
        assert layer.attention.rope is not None
        assert np.isfinite(layer.attention.rope.inverse_frequencies()).all()
