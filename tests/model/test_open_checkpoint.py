"""What a path may name, and what is said when it names something else."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint
from tests.model.gguf_files import tiny_metadata, tiny_tensors, write_gguf
from tests.model.tiny import CASES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny_metadata(), tiny_tensors())


def test_a_gguf_file_or_its_folder(model: Path) -> None:
    (model.parent / "README.md").write_text("# a model")
    assert open_checkpoint(model).path == model
    assert open_checkpoint(model.parent).path == model


def test_a_gguf_file_of_any_name(model: Path) -> None:
    assert open_checkpoint(model.rename(model.with_name("sha256-0123"))).architecture.family == "llama"


def test_several_gguf_files_must_be_told_apart(model: Path) -> None:
    model.with_name("other.gguf").write_bytes(model.read_bytes())
    with pytest.raises(ModelFormatError, match=r"several GGUF files: name one of model\.gguf, other\.gguf"):
        open_checkpoint(model.parent)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelFormatError, match=r"holds no model.*\.gguf.*config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(pickle.dumps({"weight": 1}))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelFormatError, match=rf"{name}.*pickle.*safetensors"):
            open_checkpoint(path)


def test_half_a_safetensors_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        open_checkpoint(weights)


def test_a_safetensors_folder_or_its_file(tmp_path: Path) -> None:
    CASES["qwen3"](tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        plain, narrowed = open_checkpoint(path), open_checkpoint(path, quantization="int8")
        assert plain.architecture.family == "qwen3"
        assert isinstance(narrowed.tensor("layers.0.attention.q.weight"), QuantTensor)
        assert plain.fingerprint() != narrowed.fingerprint()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a text file that is long enough to have a header")
    with pytest.raises(ModelFormatError, match=r"starts with b'a te', not with b'GGUF'"):
        open_checkpoint(tmp_path / "notes.txt")
