"""Starting, losing clients, and stopping."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests import http
from tests.e2e.running import RunningServer, run, serving

# Opens a stream, says so once something of it has come, and then waits to be killed.
_VICTIM = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
body = sys.argv[3].encode()
s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\n")
s.sendall(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
while b"data: " not in s.recv(65536):
    pass
print("streaming", flush=True)
while s.recv(65536):
    pass
"""
LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}


def test_killing_100_clients_leaves_nothing_behind(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": True})
    for _ in range(10):
        victims = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _VICTIM, host, port, body], stdout=subprocess.PIPE
            )
            for _ in range(10)
        ]
        for victim in victims:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"streaming\n"
        for victim in victims:
            victim.kill()
            victim.wait()
            assert victim.stdout is not None
            victim.stdout.close()
    server.wait_idle()
    answer = http.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=30)
    assert answer.status_code == 200


def test_sigterm_lets_running_requests_finish(smollm2_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log=log) as server:
        text: list[str] = []

        def read() -> None:
            asked = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with http.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as stream:
                text.extend(stream.iter_text())

        reader = threading.Thread(target=read)
        reader.start()
        while not text:
            time.sleep(0.005)
        server.process.send_signal(signal.SIGTERM)
        while http.get(f"{server.url}/health/readiness").status_code == 200:
            time.sleep(0.005)
        assert http.get(f"{server.url}/health").status_code == 200
        refused = http.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        reader.join()
        assert "".join(text).endswith("data: [DONE]\n\n")
        assert server.process.wait(60) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["event"] == "draining" for line in lines)


def test_draining_has_an_end_and_cut_streams_say_so(smollm2_path: Path) -> None:
    with serving("--drain-timeout", "0.2") as server:
        asked = LONG | {"max_tokens": 8000, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as stream:
            pieces = stream.iter_text()
            next(pieces)
            server.process.send_signal(signal.SIGTERM)
            text = "".join(pieces)
        assert "event: error" in text
        assert "[DONE]" not in text
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_at_once(smollm2_path: Path) -> None:
    asked = LONG | {"stream": True}
    with (
        serving() as server,
        http.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=30) as stream,
    ):
        pieces = stream.iter_text()  # dropped, it would close the connection
        next(pieces)
        server.process.send_signal(signal.SIGINT)
        while http.get(f"{server.url}/health/readiness").status_code == 200:
            time.sleep(0.005)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130, "it did not wait for the stream, which would have been 0"


def test_cold_start(smollm2_path: Path) -> None:
    """Process start to readiness in under 1.2 s of its own time, with warm caches; four tries."""
    times: list[float] = []
    while not times or (min(times) >= 1.2 and len(times) < 4):
        with serving() as server:
            assert http.get(f"{server.url}/health/readiness").status_code == 200
            wall = time.monotonic() - server.started
            spent = psutil.Process(server.process.pid).cpu_times()
            # on a machine busy with other work, the time spent computing is what can be held against us
            times.append(min(wall, spent.user + spent.system))
    assert min(times) < 1.2, times


def test_the_printed_curl_works(server: RunningServer) -> None:
    command = next(line for line in server.output if line.startswith("curl"))
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.startswith("data: ")
    assert answer.stdout.endswith("data: [DONE]\n\n")


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", "--port", str(port))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["serve", "--port", "0", "--kv-cache-memory", "lots"], "--kv-cache-memory"),
        (["chat", "-m", "./missing.gguf"], "missing.gguf"),
    ],
)
def test_failures_are_one_line_and_status_1(arguments: list[str], says: str) -> None:
    ended = run(*arguments, text="hi")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert says in lines[0]


def test_one_thread_and_an_api_key(smollm2_path: Path) -> None:
    with serving("--threads", "1", env={"HEADRACE_API_KEY": "k"}) as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert http.post(url, json=body).status_code == 401
        granted = http.post(url, json=body, headers={"authorization": "Bearer k"}, timeout=30)
        assert "Paris" in granted.json()["choices"][0]["text"]


def test_a_killed_engine_process_ends_streams_and_is_seen(smollm2_path: Path) -> None:
    with serving("--engine-process") as server:
        asked = LONG | {"stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=30) as stream:
            pieces = stream.iter_text()
            next(pieces)
            for child in psutil.Process(server.process.pid).children(recursive=True):
                child.kill()
            text = "".join(pieces)
        assert "event: error" in text
        assert "engine_dead" in text
        assert http.get(f"{server.url}/health").status_code == 503
        refused = http.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert server.stop() == 0


def test_the_engine_in_a_process_of_its_own(smollm2_path: Path) -> None:
    with serving("--engine-process") as server:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = http.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
        assert "Paris" in answer["choices"][0]["text"]
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert all(not child.is_running() for child in children), "the engine's process must not stay"
