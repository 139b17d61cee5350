"""headrace compress repair: the same format and size, nearer to the floats that it was made of."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.cli import main
from headrace.lab.compress.training.quantized_student import QuantizedStudent
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.lab.training import Train, read_training, trainer

ROUND = "steps:\n- {step: round, bits: 4, group_size: 16, symmetric: SYMMETRIC}\n"


@pytest.fixture(scope="module")
def files(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also the model rounded to 4 bits, in a folder for each format that is called like it."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("model", "data.jsonl", "text.txt"):
        (folder / name).symlink_to(taught / name)
    patch = pytest.MonkeyPatch()
    for form in ("compressed-tensors", "gptq", "gptq-v2", "awq"):
        recipe = folder / f"{form}.yaml"
        recipe.write_text(ROUND.replace("SYMMETRIC", str(form == "gptq").lower()))
        arguments = ["quantize", str(folder / "model"), "--recipe", str(recipe), "-o", str(folder / form)]
        patch.setattr("sys.argv", ["headrace", "compress", *arguments, "--format", form, "--no-eval"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    patch.undo()
    return folder


@pytest.fixture
def train(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    return trainer(files, capsys, monkeypatch)


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "gptq-v2", "awq"])
def test_it_comes_closer_at_the_same_size(form: str, train: Train, files: Path, tmp_path: Path) -> None:
    output = tmp_path / "repaired"
    common = ["--teacher", str(files / "model"), "-o", str(output), "--steps", "25"]
    done = train("repair", *common, "--learning-rate", "5e-3", "--no-eval", model=form)
    assert done.returncode == 0, done.stderr
    report = read_training(output)
    assert report.kl_after < 0.95 * report.kl_before
    assert re.search(r"held-out KL .* nats per token a minute", done.stdout)
    before, after = open_checkpoint(files / form), open_checkpoint(output)
    assert isinstance(before, SafetensorsCheckpoint) and isinstance(after, SafetensorsCheckpoint)
    for name in before.names():
        assert before.stored_as(name) == after.stored_as(name)
        old, new = before.tensor(name), after.tensor(name)
        if hasattr(old, "codes"):
            assert np.array_equal(old.codes, new.codes)  # type: ignore[union-attr]
    for path in (files / form).iterdir():
        if path.name not in ("compress.json", "compress.md"):
            assert (output / path.name).stat().st_size == path.stat().st_size
    assert not (output / "compress.json").exists()
    assert (output / "config.json").read_bytes() == (files / form / "config.json").read_bytes()
    changed = [
        name
        for name in before.names()
        if not np.array_equal(as_float32(before.tensor(name)), as_float32(after.tensor(name)))
    ]
    assert any("norm" in name for name in changed) and any("attention.q" in name for name in changed)
    again = train("repair", *common[:2], "-o", str(tmp_path / "again"), "--steps", "1", "--no-eval",
                  model=str(output))  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert read_training(tmp_path / "again").kl_before == pytest.approx(report.kl_after, rel=1e-6)


def test_codes_that_may_move_come_closer_still(train: Train, files: Path, tmp_path: Path) -> None:
    found = {}
    for weights in ([], ["--weights"]):
        output = tmp_path / f"out{len(weights)}"
        done = train("repair", "--teacher", str(files / "model"), "-o", str(output), "--steps", "45",
                     *weights, "--learning-rate", "3e-3", "--patience", "9", "--no-eval",
                     model="compressed-tensors")  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[len(weights)] = read_training(output)
    assert found[1].kl_after < found[0].kl_after
    assert found[1].weights_bytes == found[0].weights_bytes


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "gptq-v2", "awq"])
def test_codes_are_written_as_they_were_trained(form: str, train: Train, files: Path, tmp_path: Path) -> None:
    common = ["repair", "--teacher", str(files / "model"), "--no-eval"]
    done = train(*common, "-o", str(tmp_path / "out"), "--steps", "8", "--learning-rate", "3e-3", "--weights",
                 model=form)  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = open_checkpoint(files / form), open_checkpoint(tmp_path / "out")
    assert any(
        not np.array_equal(before.tensor(name).codes, after.tensor(name).codes)  # type: ignore[union-attr]
        for name in before.names()
        if "attention.q" in name
    )
    done = train(*common, "-o", str(tmp_path / "again"), "--steps", "1", model=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    trained = read_training(tmp_path / "out").kl_after
    assert read_training(tmp_path / "again").kl_before == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("recipe", ["fp8", "smoothquant-w8a8"])
def test_one_scale_an_output_is_repaired_too(
    recipe: str, train: Train, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["quantize", str(files / "model"), "--recipe", recipe, "-o", str(tmp_path / "made")]
    arguments += ["--calibration", str(files / "data.jsonl"), "--no-eval"]
    monkeypatch.setattr("sys.argv", ["headrace", "compress", *arguments])
    with pytest.raises(SystemExit):
        main()
    done = train("repair", "--teacher", str(files / "model"), "-o", str(tmp_path / "out"), "--steps", "10",
                 "--no-eval", model=str(tmp_path / "made"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = read_training(tmp_path / "out")
    assert report.kl_after <= report.kl_before
    again = train("repair", "--teacher", str(files / "model"), "-o", str(tmp_path / "again"), "--steps", "1",
                  "--no-eval", model=str(tmp_path / "out"))  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert read_training(tmp_path / "again").kl_before == pytest.approx(report.kl_after, rel=1e-6)


def test_an_untrained_student_is_what_its_folder_holds(files: Path) -> None:
    for form in ("compressed-tensors", "gptq", "awq"):
        opened = open_checkpoint(files / form)
        assert isinstance(opened, SafetensorsCheckpoint)
        weights = QuantizedStudent(opened).weights()
        for name in opened.names():
            expected = torch.from_numpy(np.array(as_float32(opened.tensor(name))))
            assert torch.equal(weights[name].detach(), expected)


def test_what_cannot_be_repaired_is_told(train: Train, files: Path, tmp_path: Path) -> None:
    common = ["--teacher", str(files / "model"), "-o", str(tmp_path / "out"), "--steps", "1"]
    done = train("repair", *common, model="model")
    assert (done.returncode, "holds no quantised weights" in done.stderr) == (1, True)
    done = train("repair", "--teacher", str(files / "model"), "-o", str(files / "awq"), model="awq")
    assert (done.returncode, "exists" in done.stderr) == (1, True)
    assert not (tmp_path / "out").exists()
