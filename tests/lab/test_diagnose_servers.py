"""headrace diagnose on real servers that are slow on purpose: it must name why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headrace

pytestmark = pytest.mark.native

_ENV = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(headrace.__file__).parents[1]), str(Path.cwd())])
}
_DIAGNOSE = [sys.executable, "-m", "headrace.cli", "diagnose"]
_SHORT = ["--seconds", "3", "--prompt-tokens", "24", "--output-tokens", "24", "--json"]


def diagnosis(target: str, *options: str) -> dict[str, Any]:
    """What it prints as JSON."""
    done = subprocess.run(
        [*_DIAGNOSE, target, *_SHORT, *options],
        env=_ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["diagnosis"]


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """``python -m command`` as a server on a free port; its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--port", "0"],
        env=_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(autouse=True)
def _model(smollm2_path: Path) -> None:
    """Pulled before the clock runs."""


def test_a_batch_of_one() -> None:
    found = diagnosis("smollm2-135m", "--serve", "--max-num-seqs 1")
    first = found["findings"][0]
    assert first["cause"] == "batch_too_small", found
    assert first["attempt"].startswith("--max-num-seqs ") and int(first["attempt"].split()[1]) >= 4
    assert first["factor"] > 1
    before, after, compare = first["proof"]
    assert "--serve '--max-num-seqs 1'" in before and f"--serve '{first['attempt']}'" in after
    assert compare == "headrace bench --compare before.json after.json"
    assert found["engine"] == "headrace" and found["ttft"]["source"] == "server"


def test_a_tiny_kv_pool() -> None:
    found = diagnosis("smollm2-135m", "--serve", "--kv-cache-memory 4MiB")
    first = found["findings"][0]
    assert first["cause"] == "kv_full", found
    assert first["attempt"].startswith("--kv-cache-memory ") and first["attempt"].endswith("MiB")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no second thread to give")
def test_one_thread() -> None:
    found = diagnosis("smollm2-135m", "--serve", "--threads 1")
    first = found["findings"][0]
    assert first["cause"] == "cpu_bound", found
    assert first["attempt"].startswith("--threads ") and first["factor"] >= 2
    assert found["utilisation"]["share"] < 0.8 and found["utilisation_cause"] == first["title"]


def test_a_slow_tokenizer() -> None:
    with serving("tests.lab.slow_tokenizer", "serve", "smollm2-135m") as address:
        found = diagnosis(address)
    first = found["findings"][0]
    assert first["cause"] == "frontend", found
    assert found["ttft"]["frontend_ms"] > 150
    assert "# now change: --engine-process" in first["proof"]


def test_a_queue_limit() -> None:
    found = diagnosis("smollm2-135m", "--serve", "--max-waiting 1")
    first = found["findings"][0]
    assert first["cause"] == "queueing", found
    assert first["attempt"].startswith("--max-waiting ")
    assert any("overloaded" in line for line in first["evidence"])


def test_a_client_that_is_held_back() -> None:
    """Stopped for three quarters of the time, as a container without enough of the processor is."""
    client = subprocess.Popen(
        [*_DIAGNOSE, "smollm2-135m", *_SHORT],
        env=_ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stderr is not None and client.stdout is not None
    client.stderr.readline()  # the load has begun
    reader = threading.Thread(target=client.stderr.read, daemon=True)
    reader.start()
    out: list[str] = []
    result = threading.Thread(target=lambda: out.append(client.stdout.read()), daemon=True)
    result.start()
    while client.poll() is None:
        client.send_signal(signal.SIGSTOP)
        time.sleep(0.09)
        client.send_signal(signal.SIGCONT)
        time.sleep(0.03)
    result.join(10)
    assert client.returncode == 0
    first = json.loads(out[0])["diagnosis"]["findings"][0]
    assert first["cause"] == "client", out[0]
