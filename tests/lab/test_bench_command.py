"""headrace bench from outside: what it prints, writes and returns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.errors import HeadraceError
from headrace.lab.bench.result import read, write
from tests.lab.measuring import bench, running, small_headrace
from tests.lab.streaming_server import Streamer

_FOUND = {"PYTHONPATH": str(Path(headrace.__file__).parents[1])}  # also from another folder
_COMMAND = [sys.executable, "-m", "headrace.cli", "bench"]
_SHORT = ["--concurrency", "1,2", "--duration", "0.6", "--warmup", "0.1", "--prompt-tokens", "24"]
_SHORT += ["--output-tokens", "6"]


def run(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return subprocess.run(
        [*_COMMAND, *arguments],
        cwd=folder,
        env=os.environ | _FOUND | (env or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class _Page(HTMLParser):
    """Counts what matters of a page, and what it would load from elsewhere."""

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


def test_a_sweep_prints_a_table_and_writes_report_and_result(tmp_path: Path) -> None:
    with small_headrace(step_s=0.001) as address:
        done = run(address, *_SHORT, "--slo", "e2e=10s", "--output", "mine.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("1 user ", "2 users", "TTFT p50", "out tok/s", "goodput", "report: mine.html", "cores")
    for said in (*words, "client alone, against a no-op server"):
        assert said in done.stdout, said
    result = read(tmp_path / "mine.json")
    assert [stage.label for stage in result.stages] == ["1 user", "2 users"]
    assert result.context.cores >= 1 and result.context.cpu and result.context.packages["aiohttp"]
    assert result.endpoint.model == "small" and result.workload.hash
    floor = result.client_floor
    assert floor is not None and floor.requests > 20
    assert 0 < floor.ttft_p50_ms <= floor.ttft_p99_ms and floor.ttft_p50_ms < 500
    page = _Page()
    text = (tmp_path / "mine.html").read_text("utf-8")
    page.feed(text)
    assert page.outside == [] and page.tags.count("svg") == 1
    assert page.tags.count("tr") > 3 and "small" in text and result.context.machine in text
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def two_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with slow.json and fast.json, which is faster in all that is compared."""
    folder = tmp_path_factory.mktemp("results")
    for name, first_s, gap_s in (("slow", 0.2, 0.06), ("fast", 0.02, 0.02)):
        with running(Streamer(first_s=first_s, gap_s=gap_s)) as address:
            write(bench(address, requests=16), folder / f"{name}.json")
    return folder


def test_the_exit_status_tells_ci(two_results: Path) -> None:
    worse = run("--compare", "fast.json", "slow.json", folder=two_results)
    assert worse.returncode == 1 and "verdict: worse" in worse.stdout and "(paired)" in worse.stdout
    wrong = run("--compare", "fast.json", "missing.json", folder=two_results)
    assert wrong.returncode == 2 and "missing.json" in wrong.stderr and "Traceback" not in wrong.stderr


def test_a_comparison_without_a_fall_is_a_success(two_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_results)
    better = CliRunner().invoke(app, ["bench", "--compare", "slow.json", "fast.json"])
    assert better.exit_code == 0 and "verdict: better" in better.stdout
    same = CliRunner().invoke(app, ["bench", "--compare", "fast.json", "fast.json"])
    assert same.exit_code == 0 and "verdict: no evidence" in same.stdout


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    streamer = Streamer(first_s=0.05)
    with running(streamer) as address:
        arguments = ["--duration", "60", "--warmup", "0.2", "--concurrency", "2", "--api-key", "sk-secret"]
        arguments += ["--output", "cut.json"]
        process = subprocess.Popen(
            [*_COMMAND, address, *arguments],
            cwd=tmp_path,
            env=os.environ | _FOUND,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while len(streamer.asked) < 60:  # more than a second of load
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"interrupted" in out
    result = read(tmp_path / "cut.json")
    assert result.interrupted and result.stages[0].completed > 0 and result.stages[0].errors == {}
    assert b"sk-secret" not in (tmp_path / "cut.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["h:1", "--concurrency", "0"], "--concurrency"),
        (["h:1", "--concurrency", "1.5"], "whole numbers"),
        (["h:1", "--rate", "8,4"], "rising"),
        (["h:1", "--slo", "fast"], "--slo"),
        (["h:1", "--prompt-tokens", "many"], "--prompt-tokens"),
        (["h:1", "--output", "x.txt"], ".json"),
        (["h:1", "--serve", "--threads 1"], "--serve"),
        (["h:1", "--prompts", "a", "--dataset", "gsm8k"], "exclude"),
        (["h:1", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, HeadraceError)
    assert said in done.exception.message
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = run("http://127.0.0.1:9", folder=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "nothing answers" in done.stderr


def test_a_server_that_fails_everything_is_a_failure_with_a_report(tmp_path: Path) -> None:
    from tests.lab.streaming_server import Exchange

    streamer = Streamer()

    async def fail_later(exchange: Exchange) -> None:
        await (streamer.decent(exchange) if len(streamer.asked) <= 3 else exchange.error(429, "quota"))

    streamer.behaviour = fail_later
    with running(streamer) as address:
        done = run(address, "--requests", "4", "--warmup", "0", "--output", "x.json", folder=tmp_path)
    assert done.returncode == 1 and "no request was answered" in done.stderr
    assert "rate_limited" in done.stdout and "quota" in done.stdout
    assert (tmp_path / "x.html").exists()


def test_a_model_is_served_for_the_purpose_and_gone_afterwards(smollm2_path: Path, tmp_path: Path) -> None:
    arguments = ["--requests", "2", "--concurrency", "1", "--warmup", "0", "--output-tokens", "8"]
    done = run("smollm2-135m", *arguments, "--serve", "--threads 1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("bench-smollm2-135m-*.json")
    result = read(path)
    [stage] = result.stages
    assert stage.completed == 2 and stage.output_tokens_mean == 8
    assert stage.prompt_tokens_mean == pytest.approx(128, abs=3)
    assert stage.server is not None and stage.server.cpu_cores is not None
    assert result.settings["serve"] == "--threads 1"
    assert re.search(r"report: bench-smollm2-135m-[\d-]+\.html", done.stdout)


def test_the_server_is_gone_when_bench_is_told_to_end(smollm2_path: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*_COMMAND, "smollm2-135m", "--duration", "60"],
        cwd=tmp_path,
        env=os.environ | _FOUND,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    children: list[psutil.Process] = []
    while not any(child.net_connections() for child in children):
        assert time.monotonic() < deadline and process.poll() is None
        children = psutil.Process(process.pid).children()
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) != 0
    assert psutil.wait_procs(children, 60)[1] == []
