"""headrace compress distill: students come closer to their teachers, and bad input is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from headrace import LLM, SamplingParams
from headrace.lab.compress.training.losses import Distribution, divergence
from headrace.lab.compress.training.network import run_layers
from headrace.lab.compress.training.teacher import float_weights
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from tests.frontend.byte_model import byte_backend
from tests.lab.training import Train, read_training, trainer
from tests.model.tiny import CASES


@pytest.fixture(scope="module")
def files(taught: Path) -> Path:
    return taught


@pytest.fixture
def train(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    return trainer(files, capsys, monkeypatch)


def test_a_cut_out_student_comes_closer_and_is_served(train: Train, files: Path, tmp_path: Path) -> None:
    output = tmp_path / "student"
    done = train("distill", "--student", str(files / "two.yaml"), "-o", str(output), "--steps", "40",
                 "--learning-rate", "2e-3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = read_training(output)
    assert report.kl_after < 0.7 * report.kl_before
    assert (report.steps, report.stopped) == (40, "steps")
    assert report.history[0].step == 0 and report.history[-1].step == 40
    assert report.evaluation is not None
    assert f"held-out KL {report.kl_before:.5f} before, {report.kl_after:.5f} after" in done.stdout
    assert "step 40: held-out KL" in done.stdout
    assert "written: " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["student"]
    student = open_checkpoint(output)
    assert len(student.architecture.layers) == 2
    with LLM(str(output)) as llm:
        [answer] = llm.generate("The miller", SamplingParams(max_tokens=4, temperature=0))
    assert answer.outputs[0].token_ids


def test_the_reported_divergence_is_that_of_the_files(train: Train, files: Path, tmp_path: Path) -> None:
    """Parameters are rounded to what the files hold before the last look at held-out data."""
    from headrace.lab.compress.training.distill import Distillation
    from headrace.lab.compress.training.settings import Schedule
    from headrace.lab.compress.training.training import Asked

    def job(student: str, output: Path) -> Distillation:
        asked = Asked(
            teacher=str(files / "model"),
            output=output,
            schedule=Schedule(2e-3, steps=5),
            data=str(files / "data.jsonl"),
            sequence_length=64,
            evaluate=False,
            threads=1,
        )
        return Distillation(asked, student=student)

    first = job(str(files / "two.yaml"), tmp_path / "first").run()
    again = job(str(tmp_path / "first"), tmp_path / "again").run()
    assert again.kl_before == pytest.approx(first.kl_after, rel=1e-6)


def test_new_sizes_stored_logits_and_data_of_its_own(train: Train, files: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text(
        "layers: 2\nhidden_size: 48\nheads: 4\nkv_heads: 2\nhead_dim: 12\nfeed_forward_width: 64\n"
    )
    common = [
        "--student",
        str(sizes),
        "--steps",
        "12",
        "--learning-rate",
        "3e-3",
        "--top-k",
        "16",
        "--no-eval",
    ]
    common += [
        "--store",
        str(tmp_path / "logits"),
        "--ce-weight",
        "0.1",
        "--generate",
        "6",
        "--new-tokens",
        "8",
    ]
    done = train("distill", *common, "-o", str(tmp_path / "first"))
    assert done.returncode == 0, done.stderr
    assert "stored: the teacher's 16 likeliest tokens" in done.stdout
    report = read_training(tmp_path / "first")
    assert report.kl_after < report.kl_before
    assert report.data["generated"] == 6
    assert open_checkpoint(tmp_path / "first").architecture.hidden_size == 48
    done = train("distill", *common, "-o", str(tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    assert "stored:" not in done.stdout
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    done = train("distill", *common, "--temperature", "2", "-o", str(tmp_path / "third"))
    assert done.returncode == 1
    assert "are of another temperature" in done.stderr


def test_hidden_states_of_the_layers_that_were_cut_out_are_learned(
    train: Train, files: Path, tmp_path: Path
) -> None:
    found = {}
    for weight in ("0", "1"):
        output = tmp_path / weight
        done = train("distill", "--student", str(files / "two.yaml"), "--steps", "25",
                     "--learning-rate", "2e-3", "--hidden-weight", weight, "--no-eval",
                     "-o", str(output))  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[weight] = _apart(output, files / "model")
    assert found["1"] < found["0"]


def _apart(student: Path, teacher: Path) -> float:
    """Relative squared distance of the last residual streams on a text."""
    streams = []
    for path in (student, teacher):
        opened = open_checkpoint(path)
        streams.append(run_layers(opened.architecture, float_weights(opened), [list(range(60, 100))])[-1])
    return float((streams[0] - streams[1]).square().mean() / streams[1].square().mean())


@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_are_those_of_differences(name: str, tmp_path: Path) -> None:
    """Every architecture's definition is differentiable: its gradient tells what a small change does."""
    (tmp_path / "model").mkdir()
    CASES[name](tmp_path / "model")
    opened = open_checkpoint(tmp_path / "model")
    weights = {key: tensor.double() for key, tensor in float_weights(opened).items()}
    ids = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    key = "layers.0.attention.k.weight"
    weights[key].requires_grad_()

    def loss() -> torch.Tensor:
        return run_layers(opened.architecture, weights, ids)[-1].double().square().mean()

    (gradient,) = torch.autograd.grad(loss(), weights[key])
    at = int(gradient.abs().argmax())
    step = 1e-2
    with torch.no_grad():
        flat = weights[key].view(-1)
        flat[at] += step
        above = float(loss())
        flat[at] -= 2 * step
        below = float(loss())
    assert (above - below) / (2 * step) == pytest.approx(float(gradient.view(-1)[at]), rel=0.05)


def test_a_list_of_likeliest_tokens_never_says_more_than_all() -> None:
    draw = torch.Generator().manual_seed(1)
    teacher = torch.randn(20, 50, generator=draw).log_softmax(-1)
    logits = torch.randn(20, 50, generator=draw)
    whole = divergence(logits, Distribution(teacher))
    expected = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    assert torch.allclose(whole, expected, atol=1e-5)
    best = teacher.topk(10)
    some = divergence(logits, Distribution(best.values, best.indices))
    assert bool((some <= whole + 1e-5).all()) and bool((some >= 0).all())
    assert torch.allclose(
        divergence(teacher, Distribution(best.values, best.indices)), torch.zeros(20), atol=1e-5
    )


@pytest.mark.parametrize("likeliest", [None, 10])
def test_the_gradient_of_the_divergence_is_that_of_its_definition(likeliest: int | None) -> None:
    draw = torch.Generator().manual_seed(2)
    teacher = torch.randn(70, 50, generator=draw, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(70, 50, generator=draw).requires_grad_()
    rows = torch.rand(70, generator=draw)
    wide = logits.detach().double().requires_grad_()
    ours = wide.log_softmax(-1)
    told = Distribution(teacher.float())
    if likeliest is not None:
        best = teacher.topk(likeliest)
        told = Distribution(best.values.float(), best.indices)
        known = ours.gather(-1, best.indices)
        teacher = torch.cat((best.values, (1 - best.values.exp().sum(-1, True)).log()), -1)
        ours = torch.cat((known, (1 - known.exp().sum(-1, True)).log()), -1)
    expected = (teacher.exp() * (teacher - ours)).sum(-1)
    (expected * rows).sum().backward()
    (divergence(logits / 2, told, temperature=0.5) * rows).sum().backward()
    assert wide.grad is not None and logits.grad is not None
    assert torch.allclose(logits.grad.double(), wide.grad, atol=1e-6)


def test_another_vocabulary_is_refused_with_the_first_difference(
    train: Train, files: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(files / "model", other)
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("<pad>", special=True)])
    backend.save(str(other / "tokenizer.json"))
    done = train("distill", "--student", str(other), "-o", str(tmp_path / "out"), "--steps", "2")
    assert done.returncode == 1
    assert "has another vocabulary than the teacher (id 259 is" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("layer: 2\n", "layer: Extra inputs are not permitted"),
        ("layers: 99\n", "copies of the teacher's layers can be 1 to 3"),
        ("layers: [2, 1]\n", "must be some of the teacher's 0 to 2, in their order"),
        ("heads: 3\nkv_heads: 2\n", "heads: 3 must be a multiple of kv_heads: 2"),
        ("layers: 0\n", "layers"),
    ],
)
def test_impossible_sizes_are_told(sizes: str, said: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "sizes.yaml").write_text(sizes)
    done = train("distill", "--student", str(tmp_path / "sizes.yaml"), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_data_that_are_too_short_are_refused(train: Train, files: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "Too short."}))
    done = train("distill", "--student", str(files / "two.yaml"), "-o", str(tmp_path / "out"), "--data",
                 str(tmp_path / "short.jsonl"))  # fmt: skip
    assert done.returncode == 1
    assert "tokens are too few to calibrate with" in done.stderr


def test_options_that_do_not_go_together_are_refused(train: Train, files: Path, tmp_path: Path) -> None:
    common = ["--student", str(files / "two.yaml"), "-o", str(tmp_path / "out")]
    done = train("distill", *common, "--store", str(tmp_path / "logits"))
    assert (done.returncode, "give --top-k" in done.stderr) == (1, True)
    done = train("distill", *common, "--top-k", "100000")
    assert (done.returncode, "--top-k: 100000 must lie between" in done.stderr) == (1, True)
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text("layers: 2\nhidden_size: 32\n")
    done = train("distill", "--student", str(sizes), "-o", str(tmp_path / "out"), "--hidden-weight", "1")
    assert (done.returncode, "leave it out" in done.stderr) == (1, True)


def test_numbers_that_run_away_end_it_and_the_checkpoint_stays(
    train: Train, files: Path, tmp_path: Path
) -> None:
    common = ["--student", str(files / "two.yaml"), "--no-eval", "--checkpoint-minutes", "0", "--steps", "6"]
    done = train("distill", *common, "-o", str(tmp_path / "out"), "--learning-rate", "1e30")
    assert done.returncode == 1
    assert "not finite" in done.stderr and "checkpoint is kept in" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()
    kept = [path.name for path in (tmp_path / ".out.work").iterdir() if path.name.startswith("checkpoint-")]
    assert len(kept) == 1
    done = train("distill", *common, "-o", str(tmp_path / "out"), "--learning-rate", "1e-3")
    assert done.returncode == 0, done.stderr
    assert "goes on after" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_layers_are_copied_as_they_are(train: Train, files: Path, tmp_path: Path) -> None:
    """A learning rate of next to nothing leaves the teacher's own layers, to bfloat16."""
    (tmp_path / "sizes.yaml").write_text("layers: [0, 2]\n")
    done = train("distill", "--student", str(tmp_path / "sizes.yaml"), "-o", str(tmp_path / "out"),
                 "--steps", "1", "--learning-rate", "1e-12", "--no-eval", "--freeze-embeddings")  # fmt: skip
    assert done.returncode == 0, done.stderr
    teacher, student = open_checkpoint(files / "model"), open_checkpoint(tmp_path / "out")
    for ours, theirs in (("layers.0.", "layers.0."), ("layers.1.", "layers.2.")):
        for part in ("attention.q.weight", "feed_forward.down.weight", "attention_norm.weight"):
            np.testing.assert_allclose(
                as_float32(student.tensor(ours + part)), as_float32(teacher.tensor(theirs + part)), rtol=2**-7
            )
