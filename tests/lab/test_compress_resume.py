"""Whatever ends a compression early, the next one goes on where it stood, to the same bytes."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.lab.compress.quantize import Asked, Quantization
from tests.e2e.running import COMMAND
from tests.lab.compressing import make_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def asked(files: Path, output: Path, recipe: str = "gptq-int4", **changes: object) -> Asked:
    settings = {
        "model": str(files / "model"),
        "recipe": recipe,
        "output": output,
        "calibration": str(files / "calibration.jsonl"),
        "sequence_length": 96,
        "suites": (),
        "threads": 1,
    }
    return Asked(**(settings | changes))  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("recipe", ["gptq-int4", "awq-int4", "rtn-int4"])
def test_stopped_before_any_layer_it_goes_on_to_the_same_bytes(
    recipe: str, files: Path, tmp_path: Path
) -> None:
    Quantization(asked(files, tmp_path / "whole", recipe)).run()
    for stop in range(4):
        output = tmp_path / f"stopped-{stop}"
        begun: list[tuple[str, int]] = []

        def stopping(stage: str, index: int, total: int, stop: int = stop) -> None:
            if (stage, index) == ("layers", stop):
                raise KeyboardInterrupt

        def listening(stage: str, index: int, total: int, begun: list[tuple[str, int]] = begun) -> None:
            begun.append((stage, index))

        with pytest.raises(KeyboardInterrupt):
            Quantization(asked(files, output, recipe), progress=stopping).run()
        assert not output.exists()
        again = Quantization(asked(files, output, recipe), progress=listening)
        assert again.resumes() == stop
        again.run()
        assert begun[: 4 - stop] == [("layers", index) for index in range(stop, 4)]
        assert weights(output) == weights(tmp_path / "whole")


def test_another_recipe_model_or_calibration_starts_afresh(files: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def stop(stage: str, index: int, total: int) -> None:
        if (stage, index) == ("layers", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantization(asked(files, output), progress=stop).run()
    assert Quantization(asked(files, output)).resumes() == 2
    assert Quantization(asked(files, output, samples=8)).resumes() == 0
    assert Quantization(asked(files, output, "awq-int4")).resumes() == 0
    Quantization(asked(files, output, "awq-int4")).run()
    Quantization(asked(files, tmp_path / "whole", "awq-int4")).run()
    assert weights(output) == weights(tmp_path / "whole")


def test_killed_it_goes_on_to_the_same_bytes(files: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ["compress", "quantize", str(files / "model"), "--recipe", "gptq-int4", "-o", str(output)]
    arguments += ["--calibration", str(files / "calibration.jsonl"), "--sequence-length", "96", "--no-eval"]
    command = [*COMMAND, *arguments, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = tmp_path / ".out.work" / "layer-00000.safetensors"
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = output.exists()  # the machine may have been too quick for us
    assert finished or Quantization(asked(files, output)).resumes() >= 1
    if not finished:
        Quantization(asked(files, output)).run()
    Quantization(asked(files, tmp_path / "whole")).run()
    assert weights(output) == weights(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_one_at_a_time(files: Path, tmp_path: Path) -> None:
    first, second = (Quantization(asked(files, tmp_path / "out")) for _ in range(2))

    def meanwhile(stage: str, index: int, total: int) -> None:
        with pytest.raises(ConfigError, match=r"is at work on out\.work: wait for it, or end it"):
            second.run()

    first.progress = meanwhile
    first.run()


@pytest.mark.parametrize("room", [12_000, 60_000, 150_000])
def test_a_full_disk_is_told_and_what_is_finished_is_kept(room: int, files: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing stops in the middle, with an error."""
    output = tmp_path / "out"
    arguments = ["compress", "quantize", str(files / "model"), "--recipe", "rtn-int8", "-o", str(output)]
    process = subprocess.run(
        [*COMMAND, *arguments, "--no-eval", "--threads", "1"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"headrace: {output} cannot be written: File too large.")
    assert "the same command goes on from there" in process.stderr
    assert not output.exists()
    kept = sorted(path.name for path in (tmp_path / ".out.work").iterdir())
    assert not any(name.endswith(".part") for name in kept)
    Quantization(asked(files, output, "rtn-int8")).run()
    assert json.loads((output / "compress.json").read_text())["recipe_name"] == "rtn-int8"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_damaged_work_is_not_trusted(files: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def stop(stage: str, index: int, total: int) -> None:
        if (stage, index) == ("layers", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantization(asked(files, output), progress=stop).run()
    for name in ("stream-00002.npy", "layer-00001.safetensors"):
        path = tmp_path / ".out.work" / name
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises(ConfigError, match=rf"{name} is damaged: remove the folder"):
            Quantization(asked(files, output)).run()
        path.write_bytes(content)
    (tmp_path / ".out.work" / "about.json").write_text("{")
    again = Quantization(asked(files, output))
    assert again.resumes() == 0
    again.run()
    Quantization(asked(files, tmp_path / "whole")).run()
    assert weights(output) == weights(tmp_path / "whole")
