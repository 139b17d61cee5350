"""Whoever leaves frees what they held, wherever their request is; whoever reads slowly holds up nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.small_server import RawClient, connected, events, idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio
TEXT = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow():
    """20 ms a step, two sequences at a time, 16 tokens a step."""
    frontend = small_frontend(step_s=0.02, max_num_seqs=2, max_num_batched_tokens=16)
    yield frontend
    frontend.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_in_decode(slow: Any, stream: bool) -> None:
    app = small_app(slow)
    client = RawClient(app, TEXT, LONG | {"stream": stream})
    await until(lambda: slow.client.stats().generation_tokens >= 3)
    client.leave()
    await until(lambda: idle(slow))
    await asyncio.wait_for(client.task, 60.0)
    assert slow.client.stats().generation_tokens < 60


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_in_prefill(slow: Any, stream: bool) -> None:
    app = small_app(slow)
    client = RawClient(app, TEXT, {"prompt": "x" * 500, "max_tokens": 5, "stream": stream})
    await until(lambda: slow.client.stats().num_running_seqs == 1)
    client.leave()
    await until(lambda: idle(slow))
    await asyncio.wait_for(client.task, 60.0)
    assert slow.client.stats().generation_tokens == 0
    assert client.status is None, "nothing had been answered yet"


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_the_queue(slow: Any, stream: bool) -> None:
    app = small_app(slow)
    busy = [RawClient(app, TEXT, LONG) for _ in range(2)]
    await until(lambda: slow.client.stats().num_running_seqs == 2)
    waiting = RawClient(app, TEXT, LONG | {"stream": stream})
    await until(lambda: slow.client.stats().num_waiting_seqs == 1)
    waiting.leave()
    await until(lambda: slow.client.stats().num_waiting_seqs == 0)
    assert slow.client.stats().num_running_seqs == 2, "the neighbours go on"
    for client in busy:
        client.leave()
    await until(lambda: idle(slow))
    await asyncio.gather(*(client.task for client in (*busy, waiting)))


async def test_leaving_frees_every_choice_of_every_prompt(slow: Any) -> None:
    app = small_app(slow)
    client = RawClient(app, TEXT, LONG | {"prompt": ["a", "b", "c"], "n": 2, "stream": True})
    await until(lambda: bool(client.body))
    client.leave()
    await until(lambda: idle(slow))
    await client.task
    assert app.state.server.in_flight == 0


async def test_a_prompt_that_is_refused_takes_its_companions_along(slow: Any) -> None:
    async with connected(small_app(slow)) as client:
        refused = await client.post(TEXT, json=LONG | {"prompt": ["ab", "x" * 600]})
    assert refused.status_code == 400
    await until(lambda: idle(slow))


async def test_a_client_that_stops_reading_is_given_up() -> None:
    """The engine is not held up by it, and its request ends before its text does."""
    frontend = small_frontend(step_s=0.005)
    app = small_app(frontend, write_timeout_s=0.2)
    try:
        stalled = RawClient(app, TEXT, LONG | {"stream": True})
        stalled.stall = asyncio.Event()
        async with connected(app) as client:
            other = await client.post(TEXT, json=LONG | {"max_tokens": 20})
        assert other.json()["usage"]["completion_tokens"] == 20
        await asyncio.wait_for(stalled.task, 60.0)
        await until(lambda: idle(frontend))
        assert frontend.client.stats().generation_tokens < 400
        assert app.state.server.in_flight == 0
    finally:
        frontend.close()


async def test_a_slow_reader_gets_longer_pieces_and_all_of_the_text() -> None:
    frontend = small_frontend()
    app = small_app(frontend)
    try:
        async with connected(app) as client:
            asked = LONG | {"seed": 9}
            whole = (await client.post(TEXT, json=asked)).json()["choices"][0]["text"]
        slow = RawClient(app, TEXT, asked | {"stream": True})
        slow.stall = asyncio.Event()
        await until(lambda: idle(frontend) and frontend.client.stats().generation_tokens == 800)
        slow.stall.set()
        await slow.task
        *chunks, done = events(slow.body.decode())
        assert done == "[DONE]"
        assert len(chunks) < 100
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    finally:
        frontend.close()


async def test_a_body_that_never_ends_is_refused() -> None:
    frontend = small_frontend()
    app = small_app(frontend, read_timeout_s=0.05)

    async def endless():
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    try:
        async with connected(app) as client:
            response = await client.post(TEXT, content=endless())
        assert response.status_code == 408
    finally:
        frontend.close()
