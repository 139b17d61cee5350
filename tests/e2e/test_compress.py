"""One path from a checkpoint to a load test: compress, compare, serve, bench, all over the public faces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests import http
from tests.e2e.running import COMMAND, RunningServer
from tests.lab.compressing import make_files


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_quantize_eval_serve_and_bench(tmp_path: Path) -> None:
    files, out = make_files(tmp_path), tmp_path / "out"
    done = run(
        "compress", "quantize", files / "model", "--recipe", "smoothquant-w8a8", "-o", out,
        "--text", files / "text.txt", "--calibration", files / "calibration.jsonl", "--sequence-length", "96",
        "--gate", "default", "--threads", "1", "--speed",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "gate: passed" in done.stdout
    assert "speed of the source: loads in" in done.stdout
    done = run(
        "eval", out, "--against", files / "model", "--suite", "perplexity", "--text", files / "text.txt",
        "--tokens", "4096", "--gate", "default", "--threads", "1", "-o", tmp_path / "eval.json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    again = json.loads((tmp_path / "eval.json").read_text())["suites"]["perplexity"]["result"]
    report = json.loads((out / "compress.json").read_text())
    assert again["divergence"] == report["evaluation"]["suites"]["perplexity"]["result"]["divergence"]
    server = RunningServer(str(out), "--port", "0", "--threads", "1")
    try:
        server.wait_ready()
        model = http.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        answer = http.post(
            f"{server.url}/v1/completions", json={"model": model, "prompt": "The miller", "max_tokens": 8}
        )
        assert answer.status_code == 200
        done = run(
            "bench", f"{server.url}/v1", "--concurrency", "2", "--duration", "1", "--warmup", "0.2",
            "--prompt-tokens", "16", "--output-tokens", "4", "--output", tmp_path / "bench.json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    finally:
        server.stop()
