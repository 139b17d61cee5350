"""One request through the gateway: who may ask what, what the upstream is asked, and what comes back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import http
from tests.gateway.running import RunningGateway, Upstreams, decent, events, gateway, is_error_stream, text_of
from tests.lab.streaming_server import Exchange, Streamer

Fixture = tuple[RunningGateway, Streamer, dict[str, str]]


@pytest.fixture(scope="module")
def running(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    streamer, url = upstreams.start()
    config = {
        "upstreams": {
            "one": {
                "url": url,
                "kind": "openai",
                "api_key_env": "UPSTREAM_KEY",
                "models": {"m": {"name": "noop", "context": 4096, "price": {"input": 2.0, "output": 8.0}}},
            }
        },
        "aliases": {"gpt": "m"},
        "tenants": {
            "acme": {},
            "narrow": {"limits": {"max_output": 4, "max_context": 40, "models": ["gpt"]}},
            "other": {"limits": {"models": ["m"]}},
        },
        "max_body_mib": 1,
        "read_timeout_s": 1.0,  # of 60
    }
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(config, folder, {"UPSTREAM_KEY": "sk-upstream"}) as made:
        yield made, streamer, made.key("acme")


def test_the_openai_sdk_chats_streams_completes_and_embeds(running: Fixture) -> None:
    made, _, headers = running
    key = headers["authorization"].removeprefix("Bearer ")
    messages: Any = [{"role": "user", "content": "a b c"}]
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=2)
        assert answer.choices[0].message.content == "word0 word1 "
        stream = client.chat.completions.create(model="gpt", messages=messages, max_tokens=2, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "word0 word1 "
        assert client.completions.create(model="m", prompt="a b", max_tokens=2).usage is not None
        assert client.embeddings.create(model="m", input="a", encoding_format="float").data[0].embedding
        assert {model.id for model in client.models.list()} == {"m", "gpt"}
        assert client.models.retrieve("gpt").id == "gpt"
    made.wait_idle()


def test_the_upstream_is_asked_by_its_own_names_and_key(running: Fixture) -> None:
    made, streamer, headers = running
    made.chat(headers | {"cookie": "a=b"}, model="gpt", stream=True, max_tokens=1)
    asked = streamer.asked[-1]
    assert asked.body["model"] == "noop"
    assert asked.body["stream_options"] == {"include_usage": True}
    assert asked.body["max_completion_tokens"] == 1
    assert asked.headers["authorization"] == "Bearer sk-upstream"
    assert "cookie" not in asked.headers


def test_usage_reaches_who_asked_for_it_only(running: Fixture) -> None:
    made, _, headers = running
    silent = made.chat(headers, stream=True)
    assert "usage" not in silent.text
    told = made.chat(headers, stream=True, stream_options={"include_usage": True})
    assert json.loads(events(told)[-2])["usage"]["completion_tokens"] == 3
    assert text_of(silent) == text_of(told)


def test_usage_inside_the_last_chunk_is_taken_out(running: Fixture) -> None:
    """Some engines put it beside the finish reason."""
    made, streamer, headers = running

    async def together(exchange: Exchange) -> None:
        exchange.begin()
        *chunks, last, _, done = exchange.events(["a"])
        merged = {**json.loads(last[6:]), "usage": exchange.usage(7)}
        for event in (*chunks, b"data: " + json.dumps(merged).encode() + b"\n\n", done):
            await exchange.send(event)
        await exchange.end()

    streamer.behaviour = together
    try:
        answer = made.chat(headers, stream=True)
    finally:
        streamer.behaviour = decent
    assert text_of(answer) == "a"
    assert "usage" not in answer.text
    assert made.rows("acme")[-1]["completion_tokens"] == 7


def test_a_whole_answer_says_what_it_cost(running: Fixture) -> None:
    made, _, headers = running
    answer = made.chat(headers, max_tokens=5)
    assert float(answer.headers["x-headrace-cost-usd"]) == pytest.approx((3 * 2.0 + 5 * 8.0) / 1e6)
    assert answer.headers["x-headrace-upstream"] == "one"


def test_keys_are_asked_for(running: Fixture) -> None:
    made, _, headers = running
    for wrong in (
        {},
        {"authorization": "Bearer hr-nonsense"},
        {"authorization": headers["authorization"][7:]},
    ):
        answer = made.chat(wrong)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert made.client.get("/v1/models", headers=wrong).status_code == 401
    revoked = made.key("acme")
    assert made.chat(revoked).status_code == 200
    made.revoke_last()
    assert made.chat(revoked).status_code == 401


def test_a_tenant_gets_its_models_and_lengths_only(running: Fixture) -> None:
    made, streamer, _ = running
    narrow, other = made.key("narrow"), made.key("other")
    assert [card["id"] for card in made.client.get("/v1/models", headers=narrow).json()["data"]] == ["gpt"]
    assert made.chat(narrow, model="m").status_code == 403
    assert made.chat(other, model="gpt").status_code == 200, "an alias of a model that it may use"
    assert made.chat(narrow, model="gpt", max_tokens=5).json()["error"]["param"] == "max_tokens"
    assert made.chat(narrow, model="gpt", max_tokens=4).status_code == 200
    assert made.chat(narrow, model="gpt", max_tokens=None).status_code == 200
    assert streamer.asked[-1].body["max_completion_tokens"] == 4, "what it may use, where it says nothing"
    long = made.chat(narrow, model="gpt", max_tokens=4, messages=[{"role": "user", "content": "a" * 500}])
    assert long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"messages": []}', 400, "model"),
        (b'{"model": "none", "messages": [{}]}', 404, "model"),
        (b'{"model": "m\\r\\nx: y", "messages": [{}]}', 404, "model"),
        (b'{"model": "m", "messages": "hello"}', 400, "messages"),
        (b'{"model": "m", "messages": []}', 400, "messages"),
        (b'{"model": "m", "messages": [{}], "max_tokens": 0}', 400, "max_tokens"),
        (b'{"model": "m", "messages": [{}], "max_tokens": 1e9}', 400, "max_tokens"),
        (b'{"model": "m", "messages": [{}], "n": 100000}', 400, "n"),
        (b'{"model": "m", "messages": [{}], "stream": "yes"}', 400, "stream"),
        (b'{"model": "m", "messages": [{}], "stream_options": 1}', 400, "stream_options"),
        (b"a" * (2**20 + 1), 413, None),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(
    running: Fixture, body: bytes, status: int, param: str | None
) -> None:
    made, _, headers = running
    answer = made.client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    made.wait_idle()


def test_compressed_bodies_are_refused_by_name(running: Fixture) -> None:
    made, _, headers = running
    bomb = gzip.compress(b"a" * 10_000_000)
    answer = made.client.post("/v1/completions", content=bomb, headers=headers | {"content-encoding": "gzip"})
    assert answer.status_code == 415


def test_a_body_that_does_not_come_is_given_up(running: Fixture) -> None:
    made, _, headers = running
    host, port = made.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=50) as connection:
        key = headers["authorization"]
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\nContent-Length: 10\r\n\r\n"
        )
        connection.sendall(head.encode() + b"{")
        assert connection.recv(64).startswith(b"HTTP/1.1 408")
    made.wait_idle()


def test_ids_cannot_smuggle_headers_and_need_not_be_unique(running: Fixture) -> None:
    made, streamer, headers = running
    for given in ("my-id", "my-id", "a b", "x" * 500):
        answer = made.chat(headers | {"x-request-id": given})
        assert answer.status_code == 200
        told = answer.headers["x-request-id"]
        assert (told == given) == (given == "my-id")
        assert streamer.asked[-1].headers["x-request-id"] == told


def test_unknown_paths_and_methods_are_refused_in_openais_shape(running: Fixture) -> None:
    made, _, headers = running
    assert made.client.get("/v1/nothing", headers=headers).json()["error"]["code"] == "not_found"
    assert made.client.get("/v1/completions").status_code == 405
    assert made.client.get("/v1/models/../m", headers=headers).status_code == 404


def test_an_upstreams_refusal_comes_through_and_is_not_retried(running: Fixture) -> None:
    made, streamer, headers = running

    async def refuse(exchange: Exchange) -> None:
        error = {"message": "no such tool", "type": "invalid_request_error", "param": "tools", "code": 400}
        await exchange.whole(400, json.dumps({"error": error}).encode())

    before = len(streamer.asked)
    streamer.behaviour = refuse
    try:
        answer = made.chat(headers)
        streamed = made.chat(headers, stream=True)
    finally:
        streamer.behaviour = decent
    assert answer.status_code == streamed.status_code == 400
    assert answer.json()["error"] | {"code": None} == {
        "message": "no such tool",
        "type": "invalid_request_error",
        "param": "tools",
        "code": None,
    }
    assert len(streamer.asked) == before + 2


def test_a_client_that_leaves_frees_everything(running: Fixture) -> None:
    made, streamer, headers = running

    async def slow(exchange: Exchange) -> None:
        exchange.begin()
        for event in exchange.events(["word "] * 1000):
            await exchange.send(event)
            await asyncio.sleep(0.02)

    streamer.behaviour = slow
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    try:
        with (
            http.client(made.url) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(5)]
            assert sum(made.metric("upstream_requests").values()) == 1
        made.wait_idle()
    finally:
        streamer.behaviour = decent


def test_health_and_readiness(running: Fixture) -> None:
    made, _, _ = running
    assert made.client.get("/health").json() == {"status": "ok"}
    assert made.client.get("/health/readiness").status_code == 200


def test_a_server_of_ours_learns_whose_request_it_is(upstreams: Upstreams, tmp_path: Path) -> None:
    streamer, url = upstreams.start()
    ours = {"url": url, "kind": "headrace", "credential_env": "SHARED", "models": {"m": {}}}
    config = {"upstreams": {"one": ours}, "tenants": {"acme": {}}, "request_timeout_s": 90}
    with gateway(config, tmp_path, {"SHARED": "between-us"}) as made:
        forged = {"x-headrace-tenant": "other", "x-headrace-gateway": "guess"}
        assert made.chat(made.key("acme") | forged).status_code == 200
    headers = streamer.asked[-1].headers
    assert headers["x-headrace-gateway"] == "between-us"
    assert headers["x-headrace-tenant"] == headers["x-headrace-cache-salt"] == "acme"
    assert 80 < float(headers["x-headrace-timeout-s"]) <= 90


def test_draining_ends_what_runs_and_exits_with_0(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    config = {"upstreams": {"one": {"url": url, "models": {"m": {}}}}, "authentication": "none"}
    with gateway(config, tmp_path) as made:
        assert text_of(made.chat(stream=True)) == "word0 word1 word2 "
        assert made.stop() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_what_drains_too_long_is_told_so(upstreams: Upstreams, tmp_path: Path, stream: bool) -> None:
    begun = threading.Event()

    async def endless(exchange: Exchange) -> None:
        if stream:
            exchange.begin()
            await exchange.send(exchange.events(["word"])[0])
        begun.set()
        await asyncio.sleep(60)

    _, url = upstreams.start(endless)
    config = {"upstreams": {"one": {"url": url, "models": {"m": {}}}}, "authentication": "none"}
    with (
        gateway(config, tmp_path, arguments=["--drain-timeout", "0.1"]) as made,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(made.chat, stream=stream)
        assert begun.wait(60)
        if stream:
            made.wait(lambda: made.metric("upstream_requests")['upstream="one"'] == 1)
        made.process.send_signal(signal.SIGTERM)
        answer = asked.result(60)
        assert answer.status_code == 502 or (stream and is_error_stream(answer))
        assert made.process.wait(60) == 0
