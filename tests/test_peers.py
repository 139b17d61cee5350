"""benchmarks/peers: our engine alone, and engines that crash or hang beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"

ENGINE = """
import os, sys, time
sys.path.insert(0, {peers!r})
from protocol import Generated, Loaded, Runner, run

class Other(Runner):
    def load(self, model, form, settings):
        print("an engine that prints while it loads")
        return Loaded("other 1.0", model.stat().st_size)

    def generate(self, prompts, output_tokens):
        {before}
        return Generated(0.5, 0.25, [[7] * {length} for _ in prompts])

run(Other())
"""
CRASHES = "len(prompts) == 16 and (print('out of luck', file=sys.stderr, flush=True), os.abort())"
HANGS = "len(prompts) == 16 and time.sleep(600)"


def engine(folder: Path, name: str, before: str = "pass", length: str = "output_tokens") -> str:
    """A runner script that generates nothing but sevens, in no time, and how it is named to the driver."""
    path = folder / f"run_{name}.py"
    path.write_text(ENGINE.format(peers=str(PEERS), before=before, length=length))
    return f"{name}={path}"


def drive(*options: str) -> subprocess.Popen[str]:
    """The driver, quick, with one format of ours."""
    common = ["--quick", "--threads", "1", "--peers", "headrace:shipped"]
    command = [sys.executable, str(PEERS), *common, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def results(output: Path) -> dict[str, Any]:
    """What it wrote, by engine."""
    found: dict[str, Any] = json.loads((output / "results.json").read_text())
    assert (output / "results.png").read_bytes().startswith(b"\x89PNG")
    return found


def test_ours_beside_others_that_fail(tmp_path: Path) -> None:
    """Each failure is a line of the results; the others are measured all the same."""
    output = tmp_path / "out"
    adds = [
        engine(tmp_path, "fine"),
        engine(tmp_path, "crashes", CRASHES),
        engine(tmp_path, "hangs", HANGS),
        engine(tmp_path, "short", length="(output_tokens - 1)"),
    ]
    options = [option for add in adds for option in ("--add", add)]
    began = time.monotonic()
    driver = drive("--workloads", "A,C,D", "--timeout", "12", "--output", str(output), *options)
    said, errors = driver.communicate(timeout=240)
    assert driver.returncode == 0, errors
    assert time.monotonic() - began < 200  # not the 600 s that one of them hangs for

    report = results(output)
    rows = {row["engine"]: row for row in report["rows"]}
    ours = rows["headrace"]["workloads"]
    assert list(ours) == ["A", "C", "D"]
    for key in ("A", "C"):
        assert ours[key]["share"] > 0
        assert ours[key]["ratio"] == 1
        assert ours[key]["weights_bytes"] > 90e6
    assert ours["A"]["values"]["decode, tokens/s"]["median"] > 0
    assert ours["D"]["values"]["peak memory, MB"]["median"] > 50
    assert len(rows["headrace"]["greedy_ids"]) == 40
    assert rows["fine"]["version"] == "other 1.0"
    # 31 tokens after the first one, in a quarter of a second; 16 answers of 16 tokens in half a second
    assert rows["fine"]["workloads"]["A"]["values"]["decode, tokens/s"]["median"] == 124
    assert rows["fine"]["workloads"]["C"]["values"]["output, tokens/s"]["median"] == 512
    for name in ("crashes", "hangs"):
        assert "A" in rows[name]["workloads"] and "C" not in rows[name]["workloads"]

    problems = "\n".join(report["problems"])
    assert f"crashes:own: C: ended with status {-signal.SIGABRT}: out of luck" in problems
    assert "hangs:own: C: no answer to 'generate' in 12 s: ended" in problems
    assert "short:own: made [3] tokens for 1 prompts, not 4 each" in problems

    table = (output / "results.md").read_text()
    assert table in said
    assert "## A: single stream" in table and "| **headrace** | shipped |" in table
    assert "## Not measured" in table and "out of luck" in table
    assert "dequantising" in table


def test_interrupted_it_keeps_what_was_measured(tmp_path: Path) -> None:
    """Ctrl-C while an engine takes its time."""
    output = tmp_path / "out"
    add = engine(tmp_path, "hangs", HANGS)
    driver = drive("--workloads", "A,C", "--output", str(output), "--add", add)
    assert driver.stderr is not None
    for line in driver.stderr:
        if line.startswith("C ") and "headrace" in line:
            break
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130
    report = results(output)
    assert report["interrupted"]
    assert "A" in report["rows"][0]["workloads"]
    assert "Interrupted" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--peers", "lamma.cpp"], "there is no engine 'lamma.cpp'; there are headrace, llama.cpp"),
        (["--workloads", "A,Z"], "there is no workload 'Z'; there are A, B, C"),
        (["--add", "mine"], "'mine': write NAME=SCRIPT"),
        (["--rounds", "0"], "--rounds must be more than 0"),
        (["--model", "no-such-model-anywhere"], "no-such-model-anywhere"),
    ],
)
def test_misuse_is_one_line(options: list[str], told: str, tmp_path: Path) -> None:
    driver = drive("--output", str(tmp_path / "out"), *options)
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode != 0
    assert told in errors.splitlines()[-1]
    assert "Traceback" not in errors
