"""Quantised safetensors: every format is read to the bit, and what is malformed is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.instruction import Op
from headrace.backend.cpu.runner import open_cpu_runner
from headrace.backend.cpu.weights_file import packed_weights
from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import reference_logits
from headrace.errors import ModelFormatError
from headrace.lab.plan.recorded_step import record_step
from headrace.lab.plan.source import find
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.quantization_config import method_of
from headrace.model.weights.quantized_linear import Module
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.safetensors_file import SafetensorsFile
from tests.backend.batches import single_batch
from tests.model.quantised_folders import (
    CASES,
    awq_parts,
    ct_config,
    gptq_parts,
    int8_parts,
    load,
    packed_parts,
    rounded,
    write_folder,
)
from tests.model.tiny import CASES as MODELS

PROMPT = list(range(5, 45))
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    MODELS["llama3"](folder)
    return folder


def canonical(hf_name: str) -> str:
    parts = {"self_attn": "attention", "mlp": "feed_forward"}
    _, _, layer, block, projection, kind = hf_name.split(".")
    return f"layers.{layer}.{parts[block]}.{projection.removesuffix('_proj')}.{kind}"


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_definition(plain: Path, tmp_path: Path, name: str) -> None:
    """To the bit: scales are exact, and codes and zero points are integers."""
    floats = write_folder(plain, tmp_path / "model", CASES[name])
    checkpoint = SafetensorsCheckpoint(tmp_path / "model")
    assert set(checkpoint.names()) == set(SafetensorsCheckpoint(plain).names())
    for hf_name, dense in floats.items():
        tensor = checkpoint.tensor(canonical(hf_name))
        assert isinstance(tensor, QuantTensor)
        np.testing.assert_array_equal(tensor.dequantize(), dense, err_msg=hf_name)
        rows = np.array([3, 1, 1])
        np.testing.assert_array_equal(tensor.take_rows(rows).dequantize(), dense[rows])


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
def test_the_engine_computes_with_them(
    plain: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the float32 oracle on the same weights, and the same bits whatever the chunks."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    write_folder(plain, tmp_path / "model", CASES[name])
    checkpoint = SafetensorsCheckpoint(tmp_path / "model")
    expected = reference_logits(checkpoint, PROMPT)
    runner_settings = RunnerSettings(
        num_blocks=8, max_batch_tokens=64, max_sequences=2, max_model_len=64, max_logit_rows=64, threads=2
    )
    runner = open_cpu_runner(checkpoint, runner_settings)
    try:
        whole = runner.logits(single_batch(PROMPT, 0, [0, 1, 2], "all"))
        parts = [
            runner.logits(single_batch(PROMPT[start:end], start, [3, 4, 5], "all"))
            for start, end in ((0, 1), (1, 18), (18, 40))
        ]
    finally:
        runner.close()
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    difference = np.abs(whole - expected)
    assert difference.max() < 0.6 * np.abs(expected).mean()
    assert difference.mean() < 0.06 * np.abs(expected).mean()


# ---- single layers of any shape


def module_of(folder: Path, parts: Tensors, shape: tuple[int, int]) -> Module:
    tensors = {f"layer.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    path = folder / "one.safetensors"
    safetensors.numpy.save_file(tensors, path)
    file = SafetensorsFile(path)
    found = {name.removeprefix("layer."): (file, entry) for name, entry in file.entries.items()}
    return Module("layer", shape, found)


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(data=st.data())
def test_any_shape_bits_and_groups(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["packed", "bytes", "gptq v1", "gptq v2", "awq"]))
    bits = data.draw(st.sampled_from({"packed": [2, 4, 8], "bytes": [8], "awq": [4]}.get(kind, [2, 4, 8])))
    size = None if kind == "bytes" else data.draw(st.sampled_from([16, 32, 48, 64, 128, None]))
    inputs = data.draw(st.integers(1, 9)) * 16 if size is None else data.draw(st.integers(1, 4)) * size
    out = data.draw(st.integers(1, 40)) if kind in ("packed", "bytes") else data.draw(st.integers(1, 5)) * 16
    symmetric = kind in ("gptq v1",) or data.draw(st.booleans())
    act_order = kind in ("packed", "gptq v1", "gptq v2") and size is not None and data.draw(st.booleans())
    scale_type = data.draw(st.sampled_from([np.float16, np.float32, ml_dtypes.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    weight = rng.standard_normal((out, inputs)).astype(np.float32)
    w = rounded(
        weight,
        bits=bits,
        group_size=size,
        symmetric=symmetric,
        act_order=act_order,
        scale_type=scale_type,
        seed=data.draw(st.integers(0, 9)),
    )
    if kind == "awq":
        parts = awq_parts(w)
        config = {"quant_method": "awq", "bits": 4, "group_size": size or -1, "zero_point": True}
    elif kind.startswith("gptq"):
        parts = gptq_parts(w, less_one=kind == "gptq v1", g_idx=act_order or data.draw(st.booleans()))
        config = {"quant_method": "gptq", "bits": bits, "group_size": size or -1}
        config |= {"checkpoint_format": "gptq" if kind == "gptq v1" else "gptq_v2"}
    else:
        strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
        packed = kind == "packed"
        config = ct_config("mixed-precision", num_bits=bits, symmetric=symmetric, **strategy)
        parts = (
            packed_parts(w, symmetric=symmetric, g_idx=act_order)
            if packed
            else int8_parts(w, symmetric=symmetric)
        )
    method = method_of({"quantization_config": config})
    assert method is not None
    module = module_of(tmp_path_factory.mktemp("any"), parts, (out, inputs))
    assert set(method.check(module)) == set(parts)
    np.testing.assert_array_equal(method.read(module).dequantize(), w.dense)


# ---- folders that are not what they should be


@pytest.fixture
def broken(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """A folder of one of the cases, with its tensors or its configuration changed."""

    def make(
        name: str,
        tensors: Callable[[Tensors], Any] = lambda tensors: None,
        config: Callable[[Tensors], Any] = lambda config: None,
    ) -> Path:
        folder = tmp_path / "model"
        write_folder(plain, folder, CASES[name])
        held = load(folder / "model.safetensors")
        tensors(held)
        arrays = {key: np.ascontiguousarray(array) for key, array in held.items()}
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")
        described = json.loads((folder / "config.json").read_text())
        config(described["quantization_config"])
        (folder / "config.json").write_text(json.dumps(described))
        return folder

    return make


def read_all(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    for name in checkpoint.names():
        checkpoint.tensor(name)


DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


BROKEN: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "codes missing": ("gptq v1", drop(f"{Q}.qweight"), "q_proj"),
    "scales missing": ("gptq v1", drop(f"{Q}.scales"), r"q_proj\.scales"),
    "zero points missing": ("awq", drop(f"{Q}.qzeros"), r"q_proj\.qzeros"),
    "ct scales missing": ("ct int4", drop(f"{Q}.weight_scale"), r"q_proj\.weight_scale"),
    "ct zero points missing": ("ct int4 zero points", drop(f"{Q}.weight_zero_point"), "config_groups"),
    "fp8 scales missing": ("ct fp8", drop(f"{Q}.weight_scale"), r"q_proj\.weight_scale"),
    "codes too short": (
        "gptq v1",
        put(f"{DOWN}.qweight", lambda a: a[:-1]),
        r"down_proj\.qweight.*\[19, 64\]",
    ),
    "codes too wide": ("awq", put(f"{DOWN}.qweight", lambda a: a[:, :-1]), r"down_proj\.qweight"),
    "packed too narrow": ("ct int4", put(f"{DOWN}.weight_packed", lambda a: a[:, 1:]), "weight_packed"),
    "bytes of another shape": ("ct w8a8", put(f"{DOWN}.weight", lambda a: a[1:]), r"\[63, 160\]"),
    "codes transposed": ("gptq v1", put(f"{DOWN}.qweight", lambda a: a.T), r"down_proj\.qweight"),
    "codes of another type": ("gptq v1", put(f"{DOWN}.qweight", lambda a: a.astype(np.int64)), "is I64"),
    "scales of integers": ("awq", put(f"{DOWN}.scales", lambda a: a.astype(np.int32)), r"scales.*is I32"),
    "too few scales": (
        "gptq v1 without g_idx",
        put(f"{DOWN}.scales", lambda a: a[:-1]),
        r"down_proj\.scales",
    ),
    "too many scales": ("awq", put(f"{DOWN}.scales", lambda a: np.repeat(a, 2, 0)), r"down_proj\.scales"),
    "ct too many scales": (
        "ct int4",
        put(f"{DOWN}.weight_scale", lambda a: np.repeat(a, 2, 1)),
        r"weight_scale.*\[64, 10\]",
    ),
    "scales flat": ("gptq v1", put(f"{DOWN}.scales", lambda a: a.reshape(-1)), r"down_proj\.scales"),
    "scales NaN": ("awq", put(f"{DOWN}.scales", lambda a: a * np.float16(np.nan)), "NaN"),
    "ct scales infinite": (
        "ct w8a8",
        put(f"{DOWN}.weight_scale", lambda a: a * np.float32(np.inf)),
        r"weight_scale.*infinite",
    ),
    "fp8 NaN": (
        "ct fp8",
        put(f"{DOWN}.weight", lambda a: np.full_like(a, np.nan)),
        r"down_proj\.weight.*NaN",
    ),
    "g_idx too short": ("gptq v1", put(f"{DOWN}.g_idx", lambda a: a[:-1]), r"g_idx.*\[159\]"),
    "g_idx negative": ("gptq v1", put(f"{DOWN}.g_idx", lambda a: a - 1), "groups from -1"),
    "g_idx enormous": ("gptq v1", put(f"{DOWN}.g_idx", lambda a: a + 2**30), "groups from"),
    "g_idx one too many": ("gptq v1", put(f"{DOWN}.g_idx", lambda a: a + 1), "scales for 5 only"),
    "g_idx random": (
        "gptq v1",
        put(f"{DOWN}.g_idx", lambda a: np.random.default_rng(1).integers(0, 5, 160).astype(np.int32)),
        "multiples of",
    ),
    "ct g_idx garbage": (
        "ct int4 act-order",
        put(f"{DOWN}.weight_g_idx", lambda a: a * 100),
        "groups from|scales for",
    ),
    "shape lies": ("ct int4", put(f"{DOWN}.weight_shape", lambda a: a[::-1]), "weight_shape"),
    "a part too many": (
        "gptq v1",
        lambda tensors: tensors.update({f"{DOWN}.qweight_extra": np.ones(3, np.float32)}),
        "has no place",
    ),
    "a bias that is one": (
        "gptq v1",
        lambda tensors: tensors.update({f"{DOWN}.bias": np.ones(64, np.float16)}),
        r"down_proj\.bias.*has no place",
    ),
    "an embedding of integers": (
        "ct w8a8",
        put("model.embed_tokens.weight", lambda a: a.astype(np.int8)),
        r"embed_tokens\.weight.*is I8",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_tensors_are_refused_by_name(broken: Callable[..., Path], what: str) -> None:
    name, change, message = BROKEN[what]
    with pytest.raises(ModelFormatError, match=message):
        read_all(broken(name, change))


SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown method": ("gptq v1", {"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "no method": ("gptq v1", {"quant_method": None}, "quant_method"),
    "three bits": ("gptq v1", {"bits": 3}, "2, 4 or 8"),
    "bits in words": ("gptq v1", {"bits": "four"}, "'quantization_config.bits'"),
    "no bits": ("gptq v1", {"bits": None}, "bits"),
    "group of none": ("gptq v1 without g_idx", {"group_size": 0}, "group_size"),
    "group size negative": ("gptq v1 without g_idx", {"group_size": -7}, "group_size"),
    "group size absurd": ("gptq v1 without g_idx", {"group_size": 10**12}, "group_size"),
    "group size of others": ("gptq v1 without g_idx", {"group_size": 64}, "scales"),
    "group size too fine": ("awq", {"group_size": 8}, "scales"),
    "marlin": ("gptq v1", {"checkpoint_format": "marlin"}, "checkpoint_format"),
    "other words": ("gptq v1", {"pack_dtype": "int16"}, "pack_dtype"),
    "gemv": ("awq", {"version": "gemv"}, "gemv"),
    "awq without zero points": ("awq", {"zero_point": False}, "zero_point"),
    "awq of eight bits": ("awq", {"bits": 8}, "must be 4"),
    "ct format": ("ct int4", {"format": "nvfp4-pack-quantized"}, "nvfp4"),
    "ct not compressed": ("ct int4", {"quantization_status": "frozen"}, "frozen"),
    "ct sparse": ("ct int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "ct transforms": ("ct int4", {"transform_config": {"R1": {}}}, "transform_config"),
    "ct no groups": ("ct int4", {"config_groups": {}}, "config_groups"),
    "ct groups a list": ("ct int4", {"config_groups": [1]}, "config_groups"),
    "ct a preset": ("ct int4", {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_configurations_that_are_not_run(broken: Callable[..., Path], what: str) -> None:
    name, changes, message = SETTINGS[what]
    with pytest.raises(ModelFormatError, match=message):
        read_all(broken(name, config=lambda config: config.update(changes)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, "weight_packed"),
        ({"num_bits": 3}, "num_bits"),
        ({"num_bits": 10**30}, "num_bits"),
        ({"symmetric": False}, "config_groups"),
        ({"group_size": 64}, "config_groups"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": "many"}, "group_size"),
        ({"strategy": "block"}, "block"),
        ({"strategy": "channel"}, "config_groups"),
        ({"type": "float"}, "num_bits"),
        ({"type": "complex"}, "complex"),
    ],
)
def test_groups_at_odds_with_the_tensors(
    broken: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    def edit(config: Tensors) -> None:
        config["config_groups"]["group_0"]["weights"].update(change)

    with pytest.raises(ModelFormatError, match=message):
        read_all(broken("ct int4", config=edit))


def test_what_quantisers_leave_behind_changes_nothing(broken: Callable[..., Path]) -> None:
    """Biases of zeros, static scales of activations, scales for a cache, group indices never filled in."""

    def add(tensors: Tensors) -> None:
        tensors[f"{DOWN}.bias"] = np.zeros(64, np.float16)
        tensors[f"{DOWN}.input_scale"] = np.ones(1, np.float32)
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
        tensors[f"{DOWN}.weight_g_idx"] = np.full(160, -1, np.int32)

    folder = broken("ct int4", add)
    checkpoint = SafetensorsCheckpoint(folder)
    tensor = checkpoint.tensor("layers.1.feed_forward.down.weight")
    assert isinstance(tensor, QuantTensor)
    assert tensor.order is None


def test_patterns_of_a_configuration_are_never_run(broken: Callable[..., Path]) -> None:
    """A regular expression in a file may take for ever: which layers are quantised their tensors say."""

    def edit(config: Tensors) -> None:
        config["ignore"] = ["re:(a+)+$", "re:["]
        config["config_groups"]["group_0"]["targets"] = ["re:(.*)*x"]

    read_all(broken("ct int4", config=edit))


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(data=st.data())
def test_any_damage_to_a_config_is_refused_or_read(
    plain: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["ct int4", "gptq v1", "awq"]))
    folder = tmp_path_factory.mktemp("damage") / "model"
    write_folder(plain, folder, CASES[name])
    config = json.loads((folder / "config.json").read_text())
    at: Any = config["quantization_config"]
    while isinstance(at, dict):
        key = data.draw(st.sampled_from(sorted(at)))
        if not isinstance(at[key], dict) or data.draw(st.booleans()):
            break
        at = at[key]
    junk = st.one_of(
        st.none(), st.integers(-5, 2**70), st.text(max_size=5), st.floats(), st.just([]), st.just({})
    )
    at[key] = data.draw(junk)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read_all(folder)
    except ModelFormatError as error:
        assert str(error)


@pytest.mark.native
def test_a_damaged_order_points_inside_of_its_row(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed files are never trusted as indices: wrong numbers, no crash. Equal orders are kept once."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    write_folder(plain, tmp_path / "model", CASES["gptq v1 act-order"])
    checkpoint = SafetensorsCheckpoint(tmp_path / "model")
    packed = packed_weights(checkpoint, network_graph(checkpoint.architecture)).tensors
    q, k, v = (packed[f"layers.0.attention.{part}.order"].offset for part in "qkv")
    assert q == k != v
    (path,) = (tmp_path / "cache" / "packed").iterdir()
    raw = bytearray(path.read_bytes())
    raw[q : q + 256] = b"\xff" * 128 + b"\x7f" * 128
    path.unlink()  # the mapping keeps its pages
    path.write_bytes(raw)
    runner_settings = RunnerSettings(num_blocks=4, max_batch_tokens=64, max_sequences=1, max_model_len=64)
    runner = open_cpu_runner(checkpoint, runner_settings)
    try:
        assert runner.logits(single_batch(PROMPT, 0, [0, 1, 2])).shape == (1, 300)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("name", "width"), [("ct int4", 0.5 + 2 / 32), ("ct w8a8", 1.0), ("awq", 0.5 + 2.5 / 32)]
)
def test_plans_count_the_bytes_that_there_are(plain: Path, tmp_path: Path, name: str, width: float) -> None:
    """And record the program that would run, in the formats that it would be packed in."""
    write_folder(plain, tmp_path / "model", CASES[name])
    source = find(str(tmp_path / "model"))
    assert source.stored is not None
    assert source.stored.matrix_bytes == pytest.approx(width, rel=0.06)  # and the shapes, and scales of rows
    program = record_step(source)
    formats = {
        tuple(row["format"].tolist()) for row in program if row["op"] == Op.MATMUL and not row["logit_rows"]
    }
    assert len(formats) == 1
