"""Small pools, few or too many threads, old CPUs, little memory, and files that are no models."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests import http
from tests.e2e.running import RunningServer, run, serving

TEXT = "/v1/completions"
FRANCE = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_an_over_long_prompt_is_told_both_counts_before_any_event(
    server: RunningServer, stream: bool
) -> None:
    body = {"prompt": [17] * 9000, "stream": stream}
    refused = http.post(server.url + TEXT, json=body, timeout=30)
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/json"
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "9000 tokens" in error["message"] and "8192" in error["message"]


def test_a_prompt_larger_than_the_pool_is_refused_at_once_while_others_go_on(smollm2_path: Path) -> None:
    """4 MiB of KV cache hold 11 blocks: 176 tokens of the 8192 that the model could."""
    with serving("--kv-cache-memory", "4MiB") as server:
        text: list[str] = []

        def other() -> None:
            asked = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "seed": 3}
            answer = http.post(server.url + TEXT, json=asked, timeout=60).json()
            text.append(answer["choices"][0]["text"])

        other()
        neighbour = threading.Thread(target=other)
        neighbour.start()
        while not server.metric("vllm:num_requests_running"):
            time.sleep(0.002)
        for stream in (True, False):
            body = {"prompt": [17] * 200, "max_tokens": 1, "stream": stream}
            refused = http.post(server.url + TEXT, json=body, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "200 tokens" in refused.json()["error"]["message"]
            assert "176" in refused.json()["error"]["message"]
        neighbour.join()
        assert text[0] == text[1]
        # More than the pool holds at once is served all the same, one after the other.
        threads = [threading.Thread(target=other) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert text == [text[0]] * 6
        server.wait_idle()


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ((), {"HEADRACE_ISA": "portable"}),
        (("--threads", "9"), {}),
    ],
    ids=["no AVX", "more threads than cores"],
)
def test_slow_machines_serve(smollm2_path: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    with serving(*arguments, env=env) as server:
        answer = http.post(server.url + TEXT, json=FRANCE, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["text"]
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--kv-cache-memory", "100000GiB"], {}, "Lower kv_cache_memory_bytes (--kv-cache-memory)"),
        (["--kv-cache-memory", "1KiB"], {}, "one block of 16 tokens"),
        (["--threads", "1000"], {}, "between 1 and 256"),
        (["--max-model-len", "1"], {}, "2 or more"),
        (["--device", "cuda"], {}, "choose backend 'torch'"),
        ([], {"HEADRACE_ISA": "sse9"}, "this machine has: "),
        (["--host", "no-such-host.invalid"], {}, "cannot listen on no-such-host.invalid"),
    ],
)
def test_settings_that_cannot_be_met_are_one_line(
    smollm2_path: Path, arguments: list[str], env: dict[str, str], says: str
) -> None:
    ended = run("serve", "--port", "0", *arguments, env=env)
    assert ended.returncode == 1
    assert says in _only_line(ended.stderr)


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04}q\x00.")
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("truncated", "truncated or corrupt"),
        ("noise", "not with b'GGUF'"),
        ("empty", "less than a header"),
        ("pickle", "convert the model to safetensors"),
        ("folder of pickles", "convert the model to safetensors"),
        ("folder of nothing", "no *.safetensors or *.gguf"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "chat"])
def test_what_is_no_model_is_one_line(
    smollm2_path: Path, tmp_path: Path, kind: str, says: str, command: str
) -> None:
    with smollm2_path.open("rb") as file:
        begin = file.read(5000)
    path = tmp_path / "model.gguf"
    if kind == "truncated":
        path.write_bytes(begin)
    elif kind == "noise":
        path.write_bytes(b"no model " * 1000)
    elif kind == "empty":
        path.touch()
    elif kind == "pickle":
        path = tmp_path / "model.pt"
        path.write_bytes(b"\x80\x04}q\x00.")
    elif kind == "folder of pickles":
        path = _folder(tmp_path / "folder")
    else:
        path = tmp_path / "nothing"
        path.mkdir()
    where = ("serve", str(path), "--port", "0") if command == "serve" else ("chat", "-m", str(path))
    ended = run(*where, text="hi")
    assert ended.returncode == 1
    assert says in _only_line(ended.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "one", "two"], "two"),
        (["serve", "--backend", "tpu"], "'cpu', 'torch'"),
        (["chat", "--temperature"], "--temperature"),
        (["models", "pul"], "pull"),
        (["frobnicate"], "see headrace --help"),
        (["--nope"], "--nope"),
    ],
)
def test_misuse_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    line = _only_line(ended.stderr)
    assert line.startswith("headrace: ")
    assert says in line


def test_no_command_shows_the_help() -> None:
    for arguments in ([], ["models"]):
        ended = run(*arguments)
        assert "Usage" in ended.stdout + ended.stderr


def _only_line(printed: str) -> str:
    """The one line that is no log."""
    (line,) = [line for line in printed.splitlines() if not line.startswith("{")]
    return line
