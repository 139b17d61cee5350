"""Answers from an OpenAI-compatible endpoint: our own server, and servers that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from headrace.lab.evaluate.endpoint import EndpointAnswerer
from headrace.lab.evaluate.endpoint_client import EndpointError
from headrace.lab.evaluate.questions import Outcome, Question
from tests.e2e.running import run, serving
from tests.lab.endpoint_server import completion, server
from tests.lab.small_models import make_model

QUESTIONS = [
    Question(f"q{number}", f"Count to {number}.", 8, lambda text: Outcome({"ok": 1.0})) for number in range(3)
]


def asked(url: str) -> EndpointAnswerer:
    return EndpointAnswerer(url, "model", retry_delay_s=0.01)


def test_answers_come_in_the_order_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    keys = set()

    def respond(body: dict[str, object], key: str | None) -> tuple[int, bytes]:
        keys.add(key)
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("model", 0, 8)
        return 200, completion(f"to {body['messages'][-1]['content']}", usage={"completion_tokens": 5})  # type: ignore[index]

    with server(respond) as url:
        found = asked(url).answer(QUESTIONS)
    assert [answer.text for answer in found] == [f"to Count to {n}." for n in range(3)]
    assert [answer.tokens for answer in found] == [5, 5, 5]
    assert keys == {"Bearer secret"}


def test_a_server_that_is_busy_is_asked_again() -> None:
    seen: list[object] = []

    def respond(body: dict[str, object], key: str | None) -> tuple[int, bytes]:
        seen.append(body)
        return (503, b"busy") if len(seen) < 3 else (200, completion(None))

    with server(respond) as url:
        found = asked(url).answer(QUESTIONS[:1])
    assert [(answer.text, answer.tokens) for answer in found] == [("", None)]


@pytest.mark.parametrize(
    ("wait", "least_s"),
    [("0.3", 0.3), ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0), ("soon", 0.0)],
)
def test_a_limit_of_requests_is_waited_for(wait: str, least_s: float) -> None:
    seen: list[float] = []

    def respond(body: dict[str, object], key: str | None) -> tuple[int, bytes, dict[str, str]]:
        seen.append(time.monotonic())
        if len(seen) == 1:
            return 429, b'{"error": {"message": "slow down"}}', {"Retry-After": wait}
        return 200, completion("yes"), {}

    with server(respond) as url:
        assert asked(url).answer(QUESTIONS[:1])[0].text == "yes"
    assert len(seen) == 2
    assert seen[1] - seen[0] >= least_s


def test_a_limit_that_lasts_for_hours_is_not_waited_for() -> None:
    seen: list[object] = []

    def respond(body: dict[str, object], key: str | None) -> tuple[int, bytes, dict[str, str]]:
        seen.append(body)
        return 429, b'{"error": {"message": "quota used up"}}', {"Retry-After": "7200"}

    with (
        server(respond) as url,
        pytest.raises(EndpointError, match=r"quota used up \(it asks to wait 7200 s"),
    ):
        asked(url).answer(QUESTIONS[:1])
    assert len(seen) == 1


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    """The connection ends in the middle of the body, twice; the third answer is whole."""
    whole = completion("whole")
    connections = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            nonlocal connections
            for _ in range(3):
                connection, _address = listener.accept()
                with connection:
                    connections += 1
                    connection.recv(65536)
                    body = whole if connections == 3 else whole[:9]
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(whole)}\r\nConnection: close\r\n\r\n"
                    connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        found = asked(f"http://127.0.0.1:{listener.getsockname()[1]}").answer(QUESTIONS[:1])
        thread.join(5)
    assert (found[0].text, connections) == ("whole", 3)


@pytest.mark.parametrize(
    ("status", "body", "message", "requests"),
    [
        (401, b'{"error": {"message": "wrong key"}}', r"HTTP 401: wrong key \(.* into HEADRACE_API_KEY", 1),
        (404, b"<html>", r"HTTP 404: <html> \(check the address", 1),
        (307, b"elsewhere", "HTTP 307: elsewhere", 1),
        (200, b'{"error": {"message": "died on the way"}}', "died on the way", 1),
        (500, b"", "HTTP 500: an empty body", 4),
        (200, b"<html>hello", "no JSON: <html>hello", 1),
        (200, b'{"choices": []}', "no chat completion", 1),
    ],
)
def test_a_server_that_is_no_use(status: int, body: bytes, message: str, requests: int) -> None:
    seen: list[object] = []

    def respond(asked_body: dict[str, object], key: str | None) -> tuple[int, bytes]:
        seen.append(asked_body)
        return status, body

    with server(respond) as url, pytest.raises(EndpointError, match=message):
        asked(url).answer(QUESTIONS[:1])
    assert len(seen) == requests


def test_no_server_at_all() -> None:
    with pytest.raises(EndpointError, match="did not answer question q0"):
        asked("http://127.0.0.1:9/v1").answer(QUESTIONS[:1])


def test_our_own_server_answers_as_the_model_in_process(tmp_path: Path) -> None:
    """The same suite through HTTP and in process: the same answers, word for word."""
    make_model(tmp_path / "good", chat=True)
    suite = tmp_path / "own.yaml"
    suite.write_text("name: own\nmax_tokens: 5\ncases: [{prompt: Go, checks: [{regex: '.'}]}]\n")
    answers = []
    with serving(str(tmp_path / "good"), "--threads", "1") as running:
        for arguments in (
            [str(tmp_path / "good"), "--threads", "1"],
            [str(tmp_path / "good"), "--endpoint", f"{running.url}/v1"],
        ):
            output = tmp_path / f"{len(answers)}.json"
            done = run("eval", *arguments, "-s", str(suite), "-o", str(output))
            assert done.returncode == 0, done.stderr
            answers.append(json.loads(output.read_text())["suites"]["own"]["result"]["items"])
    assert answers[0] == answers[1]
    assert answers[0][0]["tokens"] == 5
