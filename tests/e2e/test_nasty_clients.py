"""Clients that send half, too much, too slowly, too many: the server stays up and serves the others."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from tests import http
from tests.e2e.running import RunningServer

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def serves(server: RunningServer) -> None:
    answer = http.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30)
    assert answer.status_code == 200


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open as many files as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this account may not open 1000 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_1000_idle_connections_hold_up_nobody(server: RunningServer, many_files: None) -> None:
    """Half of them silent, half in the middle of their headers."""
    opened = []
    try:
        for number in range(1000):
            connection = connect(server)
            if number % 2:
                connection.sendall(HEAD)
            opened.append(connection)
        serves(server)
        assert http.get(f"{server.url}/health/readiness").status_code == 200
    finally:
        for connection in opened:
            connection.close()
    serves(server)


def test_endless_headers_are_refused_and_take_no_memory(server: RunningServer) -> None:
    process = psutil.Process(server.process.pid)
    serves(server)
    before = process.memory_info().rss
    for _ in range(5):
        with connect(server) as connection, pytest.raises(OSError):
            connection.sendall(HEAD)
            for number in range(500):
                connection.sendall(b"A%d: %s\r\n" % (number, b"a" * 60_000))
    assert process.memory_info().rss - before < 10 * 2**20
    serves(server)


def test_a_head_that_is_too_long_is_told_the_limit(server: RunningServer) -> None:
    answer = http.get(f"{server.url}/health", headers={"a": "a" * 70_000})
    assert answer.status_code == 431
    assert "65536 bytes" in answer.json()["error"]["message"]


def test_half_a_request_and_gone(server: RunningServer) -> None:
    for cut in (1, 10, len(HEAD), len(WHOLE) - 5, len(WHOLE) - 1):
        with connect(server) as connection:
            connection.sendall(WHOLE[:cut])
    serves(server)
    server.wait_idle()


def test_pipelined_and_chunked_requests_are_answered(server: RunningServer) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    sent = WHOLE * 3 + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    with connect(server) as connection:
        connection.sendall(sent)
        received = b""
        while received.count(b'"finish_reason"') < 4:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)
def test_the_content_type_makes_no_difference(server: RunningServer, kind: str) -> None:
    """curl -d sends a form's; what counts is that the body is JSON."""
    answer = http.post(
        f"{server.url}/v1/completions", content=BODY, headers={"content-type": kind}, timeout=30
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("when", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_within_a_step(server: RunningServer, when: str, stream: bool) -> None:
    """On the real engine, whose steps of 512 prompt tokens take a while."""
    server.wait_idle()
    prompt = "Once" if when == "decode" else [17 + stream] * 8000
    most = 2000 if when == "decode" else 180
    asked = {"prompt": prompt, "max_tokens": most, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    connection = connect(server)
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    generated = server.metric("vllm:generation_tokens_total")
    while not server.metric("vllm:num_requests_running"):
        time.sleep(0.002)
    while when == "decode" and server.metric("vllm:generation_tokens_total") < generated + 3:
        time.sleep(0.002)
    steps = server.metric("headrace_step_seconds_count")
    connection.close()
    server.wait_idle()
    assert server.metric("vllm:generation_tokens_total") - generated < 1000
    if when == "prefill":
        assert server.metric("headrace_step_seconds_count") - steps <= 8, "of about 16 that the prompt takes"
        assert server.metric("vllm:generation_tokens_total") == generated


def test_leaving_the_queue_frees_the_place(server: RunningServer) -> None:
    """More sequences than run at once: those that wait leave as well as those that run."""
    server.wait_idle()
    asked = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "n": 20}
    body = json.dumps(asked).encode()
    clients = [connect(server) for _ in range(4)]
    for client in clients:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    while server.metric("vllm:num_requests_waiting") < 80 - 32:
        time.sleep(0.002)
    clients[-1].close()
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_waiting") > 60 - 32:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert server.metric("vllm:num_requests_running") == 32
    for client in clients:
        client.close()
    server.wait_idle()
