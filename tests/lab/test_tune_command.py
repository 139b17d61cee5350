"""headrace tune from outside: what it prints, writes, resumes and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.errors import HeadraceError
from tests import http
from tests.e2e.running import serving
from tests.lab.small_models import TEXT, make_model

_FOUND = {"PYTHONPATH": str(Path(headrace.__file__).parents[1])}  # also from another folder
_COMMAND = [sys.executable, "-m", "headrace.cli", "tune"]
_SHORT = ["--duration", "0.5", "--warmup", "0", "--concurrency", "2", "--prompt-tokens", "16"]
_SHORT += ["--output-tokens", "8", "--minutes", "5"]
_ONE_THREAD = ["--serve", "--threads 1"]  # there are other tests for the other cores


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return subprocess.run(
        [*_COMMAND, *arguments, *_SHORT],
        cwd=folder,
        env=os.environ | _FOUND,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Running:
    """The command while it runs; ``said`` are its lines on standard error so far."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [*_COMMAND, *arguments, *_SHORT],
            cwd=folder,
            env=os.environ | _FOUND,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Until a line begins with ``text``."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith(text) for line in self.said):
            assert time.monotonic() < deadline and self.process.poll() is None, "".join(self.said)
            time.sleep(0.02)

    def servers(self) -> list[psutil.Process]:
        """What it has started and not ended."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model ``tiny`` and a text to gate it by."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "tiny", chat=True)
    (folder / "text.txt").write_text(TEXT)
    return folder


class _Page(HTMLParser):
    """Tags of a page, and what it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            outer = name in ("src", "href", "xlink:href") and value and not value.startswith("#")
            if outer and tag in ("script", "link", "img", "image", "iframe"):
                self.outside.append(f"{tag} {value}")


def test_a_small_budget_gives_the_files_and_a_server_that_starts(smollm2_path: Path, tmp_path: Path) -> None:
    arguments = ["smollm2-135m", "--trials", "2", "--switches", "max-num-seqs", "--slo", "ttft=9s,tpot=9s"]
    done = run(*arguments, "--serve", "--threads 1 --served-model-name tuned", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("TTFT p95", "SLO met", "max-num-seqs", "report: tune-smollm2-135m/report.html"):
        assert words in done.stdout, words
    folder = tmp_path / "tune-smollm2-135m"
    found = json.loads((folder / "trials.json").read_text())
    assert [trial["config"] for trial in found["trials"]] == [{"max-num-seqs": "32"}, {"max-num-seqs": "1"}]
    first = found["trials"][0]["measurement"]
    assert first["slo_attainment"] == 1 and first["goodput"] == first["value"] > 0
    assert first["memory_bytes"] > 50e6 and first["cpu_cores"] > 0 and first["whole"]
    if found["best"] == 1:  # then it was measured again: two runs each, in turns
        assert len(json.loads((folder / "defaults.json").read_text())["stages"]) == 2
        assert len(found["confirmed"]["pairs"]) == 2 and "measured again: best, pair 2" in done.stderr
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    page = _Page()
    page.feed((folder / "report.html").read_text("utf-8"))
    assert page.outside == [] and page.tags.count("svg") == 1 and page.tags.count("tr") > 8
    options = yaml.safe_load((folder / "best.yaml").read_text())
    assert options["model"] == "smollm2-135m" and options["threads"] == 1
    with serving("--config", str(folder / "best.yaml")) as server:
        [card] = http.get(f"{server.url}/v1/models").json()["data"]
    assert card["id"] == "tuned"


def test_what_was_measured_survives_kill_9_and_ctrl_c(tiny: Path) -> None:
    many = "max-num-batched-tokens,max-num-seqs,prefix-caching,engine-process"  # it is not done before Ctrl-C
    arguments = ["tiny", *_ONE_THREAD, "--switches", many, "-o", "killed"]
    killed = Running(*arguments, folder=tiny)
    killed.wait_for("#1 ")
    servers = killed.servers()
    killed.process.kill()
    killed.process.wait()
    for server in servers:  # SIGKILL leaves nobody to end them
        server.kill()

    again = Running(*arguments, folder=tiny)
    again.wait_for("#2 ")
    assert any("2 tried before" in line for line in again.said)
    assert not any(line.startswith(("#0 ", "#1 ")) for line in again.said)
    again.process.send_signal(signal.SIGINT)
    out, _ = again.process.communicate(timeout=60)
    assert again.process.returncode == 0, again.said
    assert "interrupted" in out and "try it: headrace serve --config killed/best.yaml" in out
    found = json.loads((tiny / "killed" / "trials.json").read_text())
    assert [trial["number"] for trial in found["trials"]][:3] == [0, 1, 2] and found["interrupted"]
    assert yaml.safe_load((tiny / "killed" / "best.yaml").read_text())["model"] == "tiny"

    other = run(*arguments, "--slo", "ttft=1s", folder=tiny)
    assert other.returncode == 1 and "Traceback" not in other.stderr
    assert "killed holds another search (limits: {}, now " in other.stderr and "--overwrite" in other.stderr


def test_ctrl_c_before_anything_was_measured_ends_it(tiny: Path) -> None:
    running = Running("tiny", *_ONE_THREAD, "--switches", "engine-process", "-o", "early", folder=tiny)
    running.wait_for("2 configurations of engine-process")
    running.process.send_signal(signal.SIGINT)
    out, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == 130 and out == ""


def test_the_gate_names_what_it_refuses(tiny: Path) -> None:
    arguments = [
        "tiny",
        *_ONE_THREAD,
        "--switches",
        "quantization",
        "--trials",
        "1",
        "--gate-text",
        "text.txt",
    ]
    (tiny / "gate.yaml").write_text("kl_mean: 0.02\n")
    done = run(*arguments, "--gate", "gate.yaml", "-o", "gated", folder=tiny)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tiny / "gated" / "trials.json").read_text())
    int8, int4 = found["judged"]
    assert int8["failures"] == [] and 0 < int8["kl_mean"] < 0.02 < int4["kl_mean"]
    assert (
        f"quantization=int4 refused: perplexity: kl_mean is {int4['kl_mean']:.5f}, above 0.02" in done.stderr
    )
    assert found["switches"] == {"quantization": ["as shipped", "int8"]}
    (tiny / "strict.yaml").write_text("kl_mean: 0\n")
    strict = run(*arguments, "--gate", "strict.yaml", "-o", "strict", folder=tiny)
    assert strict.returncode == 1 and strict.stderr.splitlines()[-1].startswith(
        "headrace: there is nothing left to search: quantization=int8 refused"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slo", "fast"], "--slo: 'fast' is no limit"),
        (["--switches", "thread"], "did you mean threads"),
        (["--switches", "quantization"], "nothing to search: quantization has no other value here"),
        (["--switches", ","], "no switch was named"),
        (["--switches", "threads", "--serve", "--threads 1"], "threads is fixed or unknown"),
        (["--serve", "--thread 1"], "--serve: No such option"),
        (["--serve", "--api-key x"], "api-key is a secret: give it as HEADRACE_API_KEY"),
        (["--serve", "gemma3-270m"], "the model is named once"),
        (["--serve", "--max-num-seqs '4"], "--serve: .*No closing quotation"),
        (["--prompts", "a.jsonl", "--dataset", "gsm8k"], "exclude"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--gate", "missing.yaml"], "missing.yaml"),
        (["--prompt-tokens", "many"], "--prompt-tokens"),
        (["-o", "."], "holds other files"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["tune", "smollm2-135m", *arguments])
    assert isinstance(done.exception, HeadraceError)
    with pytest.raises(HeadraceError, match=said):
        raise done.exception
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["mine.txt"]


def test_an_encoder_is_refused(minilm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["tune", "minilm-l6"])
    assert isinstance(done.exception, HeadraceError) and "generates nothing" in done.exception.message
