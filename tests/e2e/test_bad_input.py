"""Whatever is sent, the answer is a 4xx that says why, and the next request is served."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests import http
from tests.e2e.running import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b"", 400, "valid JSON"),
        (CHAT, b"{'a': 1}", 400, "valid JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "UTF-8"),
        (CHAT, b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "nested too deeply"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, "temperature"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": USER, "max_tokens": -1}, 400, "max_tokens"),
        (CHAT, {"messages": USER, "n": 10**20}, 400, "n"),
        (CHAT, {"messages": USER, "repetition_penalty": 0}, 400, "repetition_penalty"),
        (CHAT, {"messages": USER, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": USER, "stop_token_ids": [49152]}, 400, "stop_token_ids"),
        (CHAT, {"messages": USER, "temprature": 1}, 400, "did you mean `temperature`"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "json_object or json_schema"),
        (CHAT, {"messages": USER, "guided_json": {"not": {}}}, 400, "guided_json"),
        (CHAT, {"messages": [{"role": "user", "content": "long " * 20_000}]}, 400, "context"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": [49152]}, 400, "vocabulary"),
        (TEXT, {"prompt": {"text": "x"}}, 400, "prompt"),
        (TEXT, b'{"prompt": "\\ud83d"}', 400, "valid JSON"),
        (TEXT, b" " * (8 * 2**20 + 1), 413, "limit"),
        ("/v2/completions", {}, 404, "/docs"),
        ("/v1/models", {}, 405, "use GET"),
    ],
)
def test_bad_input_is_told_what_would_be_right(
    server: RunningServer, path: str, body: Any, status: int, says: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(server.url + path, content=content, timeout=30)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    good = http.post(server.url + TEXT, json={"prompt": "a", "max_tokens": 1}, timeout=30)
    assert good.status_code == 200


@pytest.fixture(scope="session")
def api(server: RunningServer) -> Any:
    """What the server says of itself, with answers kept short."""
    schema = http.get(f"{server.url}/openapi.json").json()
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        kind = schema["components"]["schemas"][name]
        # Left out, an answer to nonsense may go on to the end of the context: right, and long.
        kind["required"] = [*kind.get("required", []), "max_tokens"]
        fields = kind["properties"]
        fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 2}
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
        fields["timeout_s"] = {"type": "number", "minimum": 60}  # less is answered, rightly, by 504
        fields["model"] = {"enum": ["smollm2-135m"]}
    schema["components"]["schemas"]["ChatCompletionRequest"]["properties"].pop("max_completion_tokens")
    loaded = schemathesis.openapi.from_dict(schema)
    loaded.config.update(base_url=server.url)
    return loaded


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: RunningServer, sent: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert http.get(f"{server.url}/health").status_code == 200


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", CHAT, RIGHT),
        ("POST", CHAT, WRONG),
        ("POST", TEXT, RIGHT),
        ("POST", TEXT, WRONG),
        ("GET", "/v1/models", RIGHT),
        ("GET", "/v1/models/{name}", RIGHT),
        ("GET", "/health", RIGHT),
        ("GET", "/health/readiness", RIGHT),
    ],
)
def test_answers_are_as_documented(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    """Requests made from the schema, right and wrong: never a 5xx, never an undocumented shape."""

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        response = case.call(timeout=30)
        assert response.status_code < 500, response.text
        case.validate_response(
            response,
            checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    answers()


def test_the_server_is_idle_after_all_that(server: RunningServer) -> None:
    server.wait_idle()
