"""BERT folders: what is read of config, modules and tensors, and what broken ones get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from headrace.errors import ModelFormatError
from headrace.model.architecture import EncoderSpec
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.tensor_shapes import expected_shapes
from tests.model.tiny_bert import (
    MAX_POSITIONS,
    MAX_TOKENS,
    tiny_bert,
    write_json,
    write_modules,
    write_pooling,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_bert(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, drop: str = "", **replace: Any) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != drop} | replace
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def test_minilm(minilm_path: Path) -> None:
    arch = open_checkpoint(minilm_path).architecture
    attention, feed_forward = arch.layers[0].attention, arch.layers[0].feed_forward
    assert (arch.family, arch.vocab_size, arch.hidden_size, arch.max_positions) == ("bert", 30522, 384, 512)
    assert (len(arch.layers), attention.heads, attention.head_dim, attention.causal) == (6, 12, 32, False)
    assert (feed_forward.width, feed_forward.activation, feed_forward.gated) == (1536, "gelu", False)
    assert arch.encoder == EncoderSpec("mean", normalize=True, max_tokens=256)


def test_names_are_the_architecture_s(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    shapes = expected_shapes(checkpoint.architecture)
    assert set(checkpoint.names()) == set(shapes)
    assert all(checkpoint.tensor(name).shape == shape for name, shape in shapes.items())


def test_token_type_0_is_part_of_every_position(folder: Path) -> None:
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    table = stored["embeddings.position_embeddings.weight"]
    types = stored["embeddings.token_type_embeddings.weight"]
    got = as_float32(SafetensorsCheckpoint(folder, quantization="int4").tensor("position_embed.weight"))
    np.testing.assert_array_equal(got, table + types[0])


def test_tensors_may_stand_below_a_prefix(folder: Path) -> None:
    before = SafetensorsCheckpoint(folder).tensor("position_embed.weight")
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    renamed = {f"bert.{name}": value for name, value in stored.items()} | {
        "cls.bias": np.zeros(3, np.float32)
    }
    safetensors.numpy.save_file(renamed, folder / "model.safetensors")
    np.testing.assert_array_equal(SafetensorsCheckpoint(folder).tensor("position_embed.weight"), before)


@pytest.mark.parametrize(
    ("pooling", "normalize"), [("mean", True), ("mean", False), ("cls", True), ("cls", False)]
)
def test_modules_say_what_becomes_of_the_rows(pooling: Any, normalize: bool, tmp_path: Path) -> None:
    tiny_bert(tmp_path, pooling=pooling, normalize=normalize)
    encoder = open_checkpoint(tmp_path).architecture.encoder
    assert encoder == EncoderSpec(pooling, normalize=normalize, max_tokens=MAX_TOKENS)


def test_a_plain_bert_is_pooled_by_the_mean(folder: Path) -> None:
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    encoder = open_checkpoint(folder).architecture.encoder
    assert encoder == EncoderSpec("mean", normalize=False, max_tokens=MAX_POSITIONS)


def test_the_fingerprint_knows_the_pooling(folder: Path) -> None:
    before = open_checkpoint(folder).fingerprint()
    assert open_checkpoint(folder).fingerprint() == before
    write_modules(folder, ["Transformer", "Pooling"])
    assert open_checkpoint(folder).fingerprint() != before


@pytest.mark.parametrize("length", [None, 10_000])
def test_texts_are_never_longer_than_the_positions(length: int | None, folder: Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length})
    encoder = open_checkpoint(folder).architecture.encoder
    assert encoder is not None
    assert encoder.max_tokens == MAX_POSITIONS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"num_attention_heads": 5}, "hidden_size"),
        ({"num_hidden_layers": 2}, "encoder.layer.2"),
        ({"num_hidden_layers": 4}, "encoder.layer.3"),
        ({"max_position_embeddings": 97}, "position_embeddings"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps"),
    ],
)
def test_a_config_of_another_network_is_refused(changes: dict[str, Any], named: str, folder: Path) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelFormatError, match=named):
        open_checkpoint(folder)


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    name = "embeddings.token_type_embeddings.weight"
    edit_tensors(folder, **{name: np.zeros((0, 64), np.float32)})
    with pytest.raises(ModelFormatError, match=name):
        open_checkpoint(folder)
    edit_tensors(folder, **{name: np.zeros((2, 64), np.int32)})
    with pytest.raises(ModelFormatError, match="I32"):
        open_checkpoint(folder)
    edit_tensors(folder, drop=name)
    with pytest.raises(ModelFormatError, match=name):
        open_checkpoint(folder)
    edit_tensors(folder, drop="embeddings.LayerNorm.bias")
    with pytest.raises(ModelFormatError, match=r"embeddings\.LayerNorm\.bias"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "kinds",
    [
        [],
        ["Transformer"],
        ["Transformer", "Pooling", "Dense"],
        ["Transformer", "Normalize", "Pooling"],
        ["Transformer", "Pooling", "Pooling"],
    ],
)
def test_other_modules_are_refused(kinds: list[str], folder: Path) -> None:
    write_modules(folder, kinds)
    with pytest.raises(ModelFormatError, match=r"modules\.json"):
        open_checkpoint(folder)


def test_other_pooling_is_refused(folder: Path) -> None:
    for modes in (["max"], ["mean", "cls"]):
        write_pooling(folder, *modes)
        with pytest.raises(ModelFormatError, match=r"1_Pooling/config\.json.*only cls, or mean"):
            open_checkpoint(folder)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    with pytest.raises(ModelFormatError, match="lasttoken"):
        open_checkpoint(folder)
    write_pooling(folder, "mean", width=65)
    with pytest.raises(ModelFormatError, match="word_embedding_dimension"):
        open_checkpoint(folder)
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    with pytest.raises(ModelFormatError, match=r"sentence_bert_config\.json.*do_lower_case"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[1]",
        b"[",
        b'[{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "../elsewhere"}]',
        b'[{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "nowhere"}]',
        b'[{"type": 3}]',
    ],
)
def test_a_broken_modules_file_is_refused(content: bytes, folder: Path) -> None:
    (folder / "modules.json").write_bytes(content)
    with pytest.raises(ModelFormatError):
        open_checkpoint(folder)
