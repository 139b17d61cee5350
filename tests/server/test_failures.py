"""When the server cannot: queues, loading, draining, engines that die, mistakes of our own."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from headrace.observe.logs import logger
from headrace.server.app import build_app
from headrace.server.state import ServerSettings, ServerState
from tests.server.small_server import RawClient, connected, events, small_app, small_frontend, until

pytestmark = pytest.mark.anyio
TEXT = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow():
    """20 ms a step, one sequence at a time, one in the queue."""
    frontend = small_frontend(step_s=0.02, max_num_seqs=1, max_waiting=1)
    yield frontend
    frontend.close()


@pytest.fixture
def impatient():
    """As ``slow``, and nobody waits for longer than 0.2 s."""
    frontend = small_frontend(step_s=0.02, max_num_seqs=1, max_waiting=1, max_queue_time_s=0.2)
    yield frontend
    frontend.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_refuses_and_says_when_to_come_back(slow: Any, stream: bool) -> None:
    app = small_app(slow)
    clients = [RawClient(app, TEXT, LONG)]
    await until(lambda: slow.client.stats().num_running_seqs == 1)
    clients.append(RawClient(app, TEXT, LONG))
    await until(lambda: slow.client.stats().num_waiting_seqs == 1)
    async with connected(app) as client:
        refused = await client.post(TEXT, json=LONG | {"stream": stream})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"
    for each in clients:
        each.leave()
    await asyncio.gather(*(each.task for each in clients))


@pytest.mark.parametrize("stream", [True, False])
async def test_waiting_too_long_is_an_http_error_even_for_a_stream(impatient: Any, stream: bool) -> None:
    app = small_app(impatient)
    busy = RawClient(app, TEXT, LONG)
    await until(lambda: impatient.client.stats().num_running_seqs == 1)
    async with connected(app) as client:
        refused = await client.post(TEXT, json=LONG | {"stream": stream})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    busy.leave()
    await busy.task


async def test_loading_then_ready_then_draining() -> None:
    """Liveness stays 200 all along; readiness is 200 only while requests are served."""
    state = ServerState(ServerSettings(served_model_names=("small",)))
    app = build_app(state)
    body = {"prompt": "a", "max_tokens": 2}

    async def seen(client: Any) -> tuple[int, int, int]:
        answers = [await client.get("/health"), await client.get("/health/readiness")]
        answers.append(await client.post(TEXT, json=body))
        return tuple(answer.status_code for answer in answers)  # type: ignore[return-value]

    async with connected(app) as client:
        assert await seen(client) == (200, 503, 503)
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "small"
        frontend = small_frontend()
        state.ready(frontend)
        assert await seen(client) == (200, 200, 200)
        state.drain()
        assert await seen(client) == (200, 503, 503)
        refused = await client.post(TEXT, json=body)
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        frontend.close()


async def test_closing_the_engine_ends_streams_with_an_error_event() -> None:
    """One error event, no [DONE]: a client must not take half an answer for a whole one."""
    frontend = small_frontend(step_s=0.01)
    app = small_app(frontend)
    client = RawClient(app, TEXT, LONG | {"stream": True, "n": 2})
    whole = RawClient(app, TEXT, LONG)
    await until(lambda: bool(client.body))
    await asyncio.to_thread(frontend.close)
    await asyncio.wait_for(asyncio.gather(client.task, whole.task), 60.0)
    *chunks, last = events(client.body.decode())
    assert "[DONE]" not in chunks
    assert last["error"]["code"] == "overloaded"
    assert all("error" not in chunk for chunk in chunks)
    assert client.body.decode().count("event: error") == 1
    assert (whole.status, json.loads(whole.body)["error"]["code"]) == (503, "overloaded")


async def test_a_dead_engine_makes_the_server_unhealthy() -> None:
    frontend = small_frontend()
    app = small_app(frontend)
    frontend.close()
    async with connected(app) as client:
        dead = await client.post(TEXT, json={"prompt": "a"})
        assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/readiness")).status_code == 503


async def test_our_own_mistakes_are_500_and_logged_without_content() -> None:
    """A settings object that breaks stands for any bug."""
    out = io.StringIO()
    frontend = small_frontend()
    state = ServerState(ServerSettings(served_model_names=("small",), max_prompts="x"), logger(out))  # type: ignore[arg-type]
    state.ready(frontend)
    async with connected(build_app(state)) as client:
        broken = await client.post(TEXT, json={"prompt": "my secret"}, headers={"x-request-id": "id-7"})
        assert broken.status_code == 500
        error = broken.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "id-7" in error["message"]
        assert (await client.get("/health")).status_code == 200
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["unexpected error", "request"]
    assert "TypeError" in lines[0]["exception"]
    assert "my secret" not in out.getvalue()
    frontend.close()


async def test_one_line_a_request_with_its_numbers() -> None:
    out = io.StringIO()
    frontend = small_frontend()
    state = ServerState(ServerSettings(), logger(out))
    state.ready(frontend)
    async with connected(build_app(state)) as client:
        body = {"prompt": "my secret", "max_tokens": 3, "ignore_eos": True}
        await client.post(TEXT, json=body, headers={"x-request-id": "id-1"})
        await client.get("/health")
    (line,) = [json.loads(text) for text in out.getvalue().splitlines()]
    assert (line["request_id"], line["status"], line["path"]) == ("id-1", 200, TEXT)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (9, 3)
    assert line["ttft_ms"] <= line["duration_ms"]
    assert "my secret" not in out.getvalue()
    frontend.close()
