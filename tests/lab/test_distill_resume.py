"""Whatever ends a training early, the next one goes on where it stood, to the same bytes."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.lab.compress.training.distill import Distillation
from headrace.lab.compress.training.settings import Schedule
from headrace.lab.compress.training.training import Asked
from tests.e2e.running import COMMAND

STEPS = 12


@pytest.fixture(scope="module")
def files(taught: Path) -> Path:
    return taught


def job(files: Path, output: Path, **changes: object) -> Distillation:
    settings = {"steps": STEPS, "checkpoint_minutes": 0.0, "micro_tokens": 128} | changes
    asked = Asked(
        teacher=str(files / "model"),
        output=output,
        schedule=Schedule(2e-3, **settings),  # type: ignore[arg-type]
        data=str(files / "data.jsonl"),
        sequence_length=64,
        evaluate=False,
        threads=1,
    )
    return Distillation(asked, student=str(files / "two.yaml"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "whole"
    job(files, output).run()
    return output


@pytest.mark.parametrize("stop", [1, 5, STEPS])
def test_interrupted_it_goes_on_to_the_same_bytes(
    stop: int, files: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    stopped = job(files, output)

    def stopping(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", stop):
            raise KeyboardInterrupt

    stopped.progress = stopping
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert not output.exists()
    again = job(files, output)
    assert again.resumes() == stop - 1  # the step that was interrupted was not kept
    report = again.run()
    assert weights(output) == weights(whole)
    assert report.steps == STEPS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_it_goes_on_to_the_same_bytes(files: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["compress", "distill", str(files / "model"), "--student", str(files / "two.yaml")]
    arguments += ["-o", str(output), "--data", str(files / "data.jsonl"), "--sequence-length", "64"]
    arguments += ["--steps", str(STEPS), "--learning-rate", "2e-3", "--micro-tokens", "128", "--no-bf16"]
    arguments += ["--checkpoint-minutes", "0", "--no-eval", "--threads", "1"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".out.work/checkpoint-0000000[2-9]")):
        if process.poll() is not None:
            break  # the machine may have been too quick for us
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not output.exists():
        again = job(files, output)
        assert (again.resumes() or 0) >= 1
        again.run()
    assert weights(output) == weights(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_settings_start_afresh(files: Path, tmp_path: Path) -> None:
    stopped = job(files, tmp_path / "out")

    def stopping(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    stopped.progress = stopping
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert job(files, tmp_path / "out").resumes() == 3
    assert job(files, tmp_path / "out", seed=1).resumes() is None
    assert job(files, tmp_path / "out", steps=STEPS + 1).resumes() is None


def test_accumulating_gradients_changes_nothing_but_the_last_bits(
    files: Path, whole: Path, tmp_path: Path
) -> None:
    at_once = job(files, tmp_path / "out", micro_tokens=4096).run()
    in_parts = job(files, tmp_path / "parts", micro_tokens=64).run()
    assert at_once.kl_after == pytest.approx(in_parts.kl_after, rel=0.02)


def test_it_ends_where_it_gets_no_better(files: Path, tmp_path: Path) -> None:
    """A student that is the teacher has nothing to learn: its gradients are none, and it ends soon."""
    (tmp_path / "all.yaml").write_text("layers: 3\n")
    same = job(files, tmp_path / "out", steps=200, evaluations=100, patience=2, warmup=0.0)
    report = Distillation(same.asked, student=str(tmp_path / "all.yaml")).run()
    assert (report.stopped, report.steps) == ("no better", 4)
    assert max(point.kl for point in report.history) < 1e-6


def test_a_full_disk_is_told_and_nothing_half_written_appears(files: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing stops in the middle, with an error."""
    output = tmp_path / "out"
    arguments = ["compress", "distill", str(files / "model"), "--student", str(files / "two.yaml")]
    arguments += ["-o", str(output), "--data", str(files / "data.jsonl"), "--sequence-length", "64"]
    process = subprocess.run(
        [*COMMAND, *arguments, "--steps", "2", "--no-eval", "--threads", "1"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)),
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"headrace: {output} cannot be written: File too large.")
    assert not output.exists()
    assert not list(tmp_path.glob("*.partial*"))
    assert not list(tmp_path.glob(".out.work/.checkpoint*"))


def test_damaged_checkpoints_are_not_trusted(files: Path, tmp_path: Path) -> None:
    stopped = job(files, tmp_path / "out")

    def stopping(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    stopped.progress = stopping
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    [kept] = tmp_path.glob(".out.work/checkpoint-*")
    for path in (kept / "model.safetensors", kept / "state.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises(ConfigError, match="is damaged: remove the folder"):
            job(files, tmp_path / "out").run()
        path.write_bytes(content)
