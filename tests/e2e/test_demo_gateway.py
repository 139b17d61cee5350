"""`make demo-gateway`: all is as it shows, it says so when it is not, and it leaves nothing running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

DEMO = Path(__file__).parents[2] / "examples" / "demo_gateway.py"


def run(demo: Path) -> subprocess.CompletedProcess[str]:
    """The demo to its end; nothing that it has started outlives it."""
    with subprocess.Popen(
        [sys.executable, str(demo)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=280)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    left = [other for other in psutil.process_iter() if _session_of(other) == process.pid]
    assert not left
    return subprocess.CompletedProcess([], process.returncode, out, err)


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, PermissionError, psutil.Error):
        return None


def test_everything_is_as_shown(smollm2_path: Path, gemma3_path: Path, minilm_path: Path) -> None:
    ended = run(DEMO)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for said in (
        "-> smollm2-135m",
        "-> gemma3-270m",
        "-> external-large",
        "cache: miss, hit, hit",
        "of 21 requests 20 are served, one gets 429",
        "v2 was promoted by itself",
        "the next request goes to: external",
        "hits: 21",
        "by the cache, $",
        "All as shown",
    ):
        assert said in ended.stdout, ended.stdout


def test_what_is_not_as_shown_is_said(smollm2_path: Path, tmp_path: Path) -> None:
    """With a file in which `fast` is another model's name."""
    shutil.copy(DEMO, tmp_path)
    example = DEMO.with_name("gateway.yaml").read_text()
    broken = example.replace("fast: smollm2-135m", "fast: a-model-that-nobody-has")
    assert broken != example
    (tmp_path / "gateway.yaml").write_text(broken)
    ended = run(tmp_path / "demo_gateway.py")
    assert ended.returncode == 1
    assert "NOT AS SHOWN" in ended.stderr
    assert "a-model-that-nobody-has" in ended.stderr
