"""Answers from an OpenAI-compatible endpoint: our own server, and servers that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.lab.evaluate.endpoint import EndpointAnswerer
from headrace.lab.evaluate.endpoint_client import EndpointError
from headrace.lab.evaluate.questions import Outcome, Question
from tests.e2e.running import run, serving
from tests.lab.small_models import make_model

QUESTIONS = [
    Question(f"q{number}", f"Count to {number}.", 8, lambda text: Outcome({"ok": 1.0})) for number in range(3)
]


@contextmanager
def server(respond: Callable[[dict[str, object], str | None], tuple[int, bytes]]) -> Iterator[str]:
    """A server whose answers ``respond`` makes of the request's body and its Authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = respond(body, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def completion(text: str | None, **more: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], **more}).encode()


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
    ("status", "body", "message", "requests"),
    [
        (401, b'{"error": {"message": "wrong key"}}', "HTTP 401: wrong key", 1),
        (404, b"<html>", "HTTP 404: <html>", 1),
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


@pytest.mark.native
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
