"""Checkpoints of safetensors: what is read, and what hostile or broken folders get."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend.torch import reference_logits
from headrace.errors import ModelFormatError
from headrace.model.checkpoint import as_float32
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.safetensors_file import SafetensorsFile
from headrace.model.weights.tensor_shapes import expected_shapes
from tests.model.tiny import CASES

PROMPT = list(range(5, 45))
Header = dict[str, Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, CASES["llama3"](folder)


@pytest.fixture
def folder(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the tiny Llama's folder, to be spoilt."""
    return Path(shutil.copytree(llama[0], tmp_path / "model"))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- what is read


def test_tensors_equal_the_library_s(llama: tuple[Path, Any]) -> None:
    checkpoint = SafetensorsCheckpoint(llama[0])
    library = safetensors.numpy.load_file(llama[0] / "model.safetensors")
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "layers.1.attention_norm.weight": "model.layers.1.input_layernorm.weight",
        "layers.2.attention.o.weight": "model.layers.2.self_attn.o_proj.weight",
        "layers.0.feed_forward_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "layers.0.feed_forward.down.weight": "model.layers.0.mlp.down_proj.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for name, hf_name in pairs.items():
        np.testing.assert_array_equal(as_float32(checkpoint.tensor(name)), library[hf_name])
    in_file = list(SafetensorsFile(llama[0] / "model.safetensors").entries)
    names = [name for name in checkpoint.names() if name in pairs]
    assert names == sorted(pairs, key=lambda name: in_file.index(pairs[name]))


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen2", "gemma3", "gemma3-multimodal"])
def test_names_are_the_architecture_s(name: str, tmp_path: Path) -> None:
    CASES[name](tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    shapes = expected_shapes(checkpoint.architecture)
    assert set(checkpoint.names()) == set(shapes)
    assert len(checkpoint.names()) == len(shapes)
    assert ("head.weight" in checkpoint.names()) == (not checkpoint.architecture.tied_head)
    for tensor in checkpoint.names():
        assert as_float32(checkpoint.tensor(tensor)).shape == shapes[tensor]


def test_gemma_norms_include_their_one(tmp_path: Path) -> None:
    model = CASES["gemma3"](tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    layer = model.model.layers[1]
    for name, parameter in (
        ("layers.1.attention_norm", layer.input_layernorm),
        ("layers.1.attention_post_norm", layer.post_attention_layernorm),
        ("layers.1.feed_forward_norm", layer.pre_feedforward_layernorm),
        ("layers.1.feed_forward_post_norm", layer.post_feedforward_layernorm),
        ("layers.1.attention.k_norm", layer.self_attn.k_norm),
        ("final_norm", model.model.norm),
    ):
        got = checkpoint.tensor(f"{name}.weight")
        np.testing.assert_array_equal(got, 1 + parameter.weight.detach().numpy())
    embed = model.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(checkpoint.tensor("embed.weight"), embed)


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"), [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)]
)
def test_half_precision(dtype: torch.dtype, numpy_dtype: Any, tmp_path: Path) -> None:
    """bf16 and fp16 files are read in their own type and compute as transformers does in float32."""
    model = CASES["qwen3"](tmp_path).to(dtype)
    model.save_pretrained(tmp_path)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    tensor = checkpoint.tensor("layers.0.attention.q.weight")
    assert isinstance(tensor, np.ndarray)
    assert tensor.dtype == numpy_dtype
    with torch.no_grad():
        expected = reloaded(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    np.testing.assert_allclose(reference_logits(checkpoint, PROMPT), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens_of", ["llama3", "gemma3"])
def test_shards(tokens_of: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model = CASES[tokens_of](whole)
    model.save_pretrained(parts, max_shard_size="60KB")
    assert len(list(parts.glob("model-*.safetensors"))) > 3
    one, many = SafetensorsCheckpoint(whole), SafetensorsCheckpoint(parts)
    assert set(one.names()) == set(many.names())
    for name in one.names():
        np.testing.assert_array_equal(one.tensor(name), many.tensor(name))


def test_the_only_safetensors_file_may_have_any_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "embed.weight" in SafetensorsCheckpoint(folder).names()


@pytest.mark.parametrize("old", [True, False])
def test_other_prefixes(folder: Path, old: bool) -> None:
    """Base models are saved without ``model.``; multimodal ones nest the text model, one way or the other."""

    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if old:
                tensors[f"language_model.{name}"] = tensors.pop(name)
            elif name.startswith("model."):
                tensors[name.removeprefix("model.")] = tensors.pop(name)

    before = SafetensorsCheckpoint(folder).tensor("layers.0.attention.q.weight")
    before = np.array(before)
    edit_tensors(folder, rename)
    checkpoint = SafetensorsCheckpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor("layers.0.attention.q.weight"), before)
    assert "head.weight" in checkpoint.names()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_load_time_quantisation(llama: tuple[Path, Any], quantization: Any) -> None:
    exact = SafetensorsCheckpoint(llama[0])
    narrow = SafetensorsCheckpoint(llama[0], quantization=quantization)
    for name in exact.names():
        got, full = narrow.tensor(name), exact.tensor(name)
        if "norm" in name:
            np.testing.assert_array_equal(got, full)
            continue
        assert isinstance(got, QuantTensor), name
        assert got.bits == (8 if name in ("embed.weight", "head.weight") else int(quantization[3:]))
        error = np.abs(got.dequantize() - as_float32(full)).max() / np.abs(as_float32(full)).max()
        assert error < (0.005 if got.bits == 8 else 0.08), name
    assert narrow.fingerprint() != exact.fingerprint()


def test_fingerprint_follows_the_files(folder: Path) -> None:
    before = SafetensorsCheckpoint(folder).fingerprint()
    assert SafetensorsCheckpoint(folder).fingerprint() == before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert SafetensorsCheckpoint(folder).fingerprint() != before


# ---- folders that are not what they should be


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_a_broken_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        SafetensorsCheckpoint(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="no weights"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelFormatError, match=f"{name}.*convert"):
        SafetensorsCheckpoint(folder)


def test_several_files_without_an_index(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    with pytest.raises(ModelFormatError, match="2 safetensors files"):
        SafetensorsCheckpoint(folder)


def test_unknown_ways_of_quantising_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ModelFormatError, match="quantization_config"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 5, None, ""]
)
def test_the_index_may_only_name_files_beside_it(folder: Path, name: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="plain"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_a_broken_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"index\.json"):
        SafetensorsCheckpoint(folder)


def test_a_missing_shard(llama: tuple[Path, Any], tmp_path: Path) -> None:
    llama[1].save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFormatError, match=f"{shard.name}, which is missing"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "again.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"again\.safetensors and model\.safetensors"):
        SafetensorsCheckpoint(folder)


# ---- files whose tensors are not the architecture's

Q_NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_NAME), f"no tensor '{Q_NAME}'"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"no tensor 'model\.embed_tokens\.weight'"),
        (lambda t: t.pop("lm_head.weight"), "tie_word_embeddings"),
        (lambda t: t.update({Q_NAME: t[Q_NAME][:-1]}), r"is \[63, 64\], but config.json makes it \[64, 64\]"),
        (lambda t: t.update({Q_NAME: t[Q_NAME].reshape(-1)}), r"is \[4096\]"),
        (lambda t: t.update({Q_NAME: t[Q_NAME].astype(np.int8)}), "is I8; weights must be one of F32"),
        (lambda t: t.update({Q_NAME: t[Q_NAME].astype(np.float64)}), "is F64"),
        (lambda t: t.update({Q_NAME.replace("weight", "bias"): np.ones(64, np.float32)}), "has no place"),
        (lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(64, np.float32)}), "no place"),
    ],
)
def test_tensors_at_odds_with_the_config(
    folder: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit_tensors(folder, change)
    with pytest.raises(ModelFormatError, match=message):
        SafetensorsCheckpoint(folder)


def test_computed_buffers_and_other_towers_are_left_alone(folder: Path) -> None:
    names = SafetensorsCheckpoint(folder).names()

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["vision_tower.layers.0.weight"] = np.ones((2, 2), np.int8)

    edit_tensors(folder, add)
    assert set(SafetensorsCheckpoint(folder).names()) == set(names)


# ---- hostile files


def write_raw(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_valid_file_of_odd_alignment(tmp_path: Path) -> None:
    """Nothing in the format aligns the data: here F32 values start at an odd byte."""
    values = np.arange(4, dtype=np.float32)
    header = {"__metadata__": {"format": "np"}, "a": entry(shape=[2, 2], offsets=[0, 16])}
    raw = json.dumps(header).encode()
    raw += b" " * ((8 + len(raw)) % 2 == 0)
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", raw, values.tobytes()))
    np.testing.assert_array_equal(file.read("a"), values.reshape(2, 2))


HOSTILE: dict[str, tuple[Header | bytes, bytes]] = {
    "not json": (b"{hello}", b""),
    "not an object": (b"[]", b""),
    "not utf-8": (b'{"\xff": 1}', b""),
    "nested too deep": (b"[" * 200_000, b""),
    "entry no object": ({"a": 5}, b""),
    "same name twice": (b'{"a": {}, "a": {}}', b""),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"0" * 8),
    "unknown dtype": ({"a": entry(dtype="F33")}, b"0" * 8),
    "dtype a list": ({"a": entry(dtype=["F32"])}, b"0" * 8),
    "negative shape": ({"a": entry(shape=[-2])}, b"0" * 8),
    "shape of floats": ({"a": entry(shape=[2.0])}, b"0" * 8),
    "shape of flags": ({"a": entry(shape=[True, 2])}, b"0" * 8),
    "shape overflows": ({"a": entry(shape=[2**62, 2**62])}, b"0" * 8),
    "too many dimensions": ({"a": entry(shape=[1] * 65 + [2])}, b"0" * 8),
    "offsets beyond the file": ({"a": entry(shape=[4], offsets=[0, 16])}, b"0" * 8),
    "offsets huge": ({"a": entry(shape=[2], offsets=[2**62, 2**62 + 8])}, b"0" * 8),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, b"0" * 8),
    "offsets negative": ({"a": entry(offsets=[-8, 0])}, b"0" * 8),
    "one offset": ({"a": entry(offsets=[0])}, b"0" * 8),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"0" * 12),
    "shared bytes": ({"a": entry(), "b": entry()}, b"0" * 8),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, b"0" * 20),
    "trailing bytes": ({"a": entry()}, b"0" * 9),
    "shape and offsets disagree": ({"a": entry(shape=[3])}, b"0" * 8),
    "half a byte": ({"a": entry(dtype="F4", shape=[3], offsets=[0, 1])}, b"0"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers(kind: str, tmp_path: Path) -> None:
    header, data = HOSTILE[kind]
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ModelFormatError, match=r"bad\.safetensors is not a valid safetensors file"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [3, 10**6, 2**63, 2**64 - 1])
def test_lying_header_lengths(length: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "bad.safetensors", {"a": entry()}, b"0" * 8, length)
    with pytest.raises(ModelFormatError, match="header"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\0" * 8])
def test_files_too_short(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match="not a valid safetensors file"):
        SafetensorsFile(path)


def test_truncation_anywhere(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for keep in (0, 7, 8, 100, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
            SafetensorsCheckpoint(folder)


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_flipped_header_bytes_never_crash(
    llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any damage to length and header is refused, or leaves every tensor readable."""
    raw = bytearray((llama[0] / "model.safetensors").read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
    except ModelFormatError:
        return
    for name, found in file.entries.items():
        if found.dtype in ("F32", "F16", "BF16"):
            assert file.read(name).shape == found.shape
