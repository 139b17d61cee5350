"""Priorities, deadlines and tenants over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.frontend.frontend import Frontend
from tests.server.small_server import connected, events, idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
SECRET = "between us"


@pytest.fixture
def slow() -> Iterator[Frontend]:
    """One sequence at a time, ten milliseconds a token."""
    made = small_frontend(step_s=0.01, max_num_seqs=1)
    yield made
    made.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


async def test_a_timeout_is_a_504_that_no_client_repeats(slow: Frontend) -> None:
    """OpenAI's client tried twice more, with the same timeout."""
    async with connected(small_app(slow)) as client:
        response = await client.post(TEXT, json=ENDLESS | {"timeout_s": 0.1, "ignore_eos": False, "seed": 3})
        assert response.status_code == 504
        assert error_of(response)["code"] == "deadline_exceeded"
        assert "timeout_s = 0.1" in error_of(response)["message"]
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        await until(lambda: idle(slow))
        fine = await client.post(TEXT, json=ENDLESS | {"timeout_s": 60.0, "max_tokens": 3})
        assert fine.status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'headrace_deadlines_missed_total{model_name="small"} 1.0' in metrics


async def test_a_timeout_in_a_stream_is_an_error_event(slow: Frontend) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "timeout_s": 1.0}
    async with connected(small_app(slow)) as client:
        response = await client.post(CHAT, json=body | {"max_tokens": 400, "logit_bias": {"256": -100}})
    assert response.status_code == 200
    data = events(response.text)
    assert len(data) > 2
    assert data[-1]["error"]["code"] == "deadline_exceeded"
    assert "event: error" in response.text
    assert "[DONE]" not in data
    await until(lambda: idle(slow))


async def test_what_cannot_be_in_time_fails_before_it_runs() -> None:
    """400 tokens at 10 ms each do not fit into two seconds, however long one tries."""
    frontend = small_frontend(step_s=0.01)
    async with connected(small_app(frontend)) as client:
        for number in range(4):
            await client.post(TEXT, json={"prompt": f"{number}", "max_tokens": 8, "ignore_eos": True})
        before = frontend.client.stats()
        response = await client.post(TEXT, json=ENDLESS | {"timeout_s": 2.0})
        assert response.status_code == 504
        assert "cannot be complete" in error_of(response)["message"]
        after = frontend.client.stats()
        assert after.num_steps - before.num_steps <= 2
        assert after.deadlines_refused == 1
    frontend.close()


async def test_beam_search_keeps_its_timeout(slow: Frontend) -> None:
    body = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 300, "timeout_s": 0.2}
    async with connected(small_app(slow)) as client:
        response = await client.post(TEXT, json=body)
    assert response.status_code == 504
    await until(lambda: idle(slow))


@pytest.mark.parametrize("timeout_s", [0, -1, "soon", True])
async def test_bad_timeouts(slow: Frontend, timeout_s: Any) -> None:
    async with connected(small_app(slow)) as client:
        response = await client.post(TEXT, json=ENDLESS | {"timeout_s": timeout_s})
    assert response.status_code == 400
    assert error_of(response)["param"] == "timeout_s"


async def order_of(
    frontend: Frontend, requests: list[tuple[str, dict[str, Any], dict[str, str]]], **settings: Any
) -> list[str]:
    """Names in the order in which their requests ended, all of them sent while another runs."""
    ended: list[str] = []
    async with connected(small_app(frontend, **settings)) as client:
        first = asyncio.create_task(client.post(TEXT, json=ENDLESS | {"max_tokens": 30}))
        await until(lambda: frontend.client.stats().num_running_seqs == 1)

        async def send(name: str, extra: dict[str, Any], headers: dict[str, str]) -> None:
            body = ENDLESS | {"max_tokens": 2} | extra
            response = await client.post(TEXT, json=body, headers=headers)
            assert response.status_code == 200, response.text
            ended.append(name)

        tasks = []
        for number, request in enumerate(requests):
            tasks.append(asyncio.create_task(send(*request)))
            await until(lambda expected=number + 1: frontend.client.stats().num_waiting_seqs == expected)
        await asyncio.gather(first, *tasks)
    return ended


async def test_the_most_urgent_goes_first(slow: Frontend) -> None:
    asked = [("later", {"priority": 5}, {}), ("normal", {}, {}), ("urgent", {"priority": -5}, {})]
    assert await order_of(slow, asked) == ["urgent", "normal", "later"]


async def test_the_gateways_tenants_take_turns(slow: Frontend) -> None:
    """Six requests of one tenant were all answered before the only one of another."""
    flood = {"x-headrace-gateway": SECRET, "x-headrace-tenant": "flood"}
    other = {"x-headrace-gateway": SECRET, "x-headrace-tenant": "other"}
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [(f"flood{i}", {}, flood) for i in range(6)]
    asked.append(("other", {}, other))
    order = await order_of(slow, asked, gateway_credential=SECRET)
    assert order.index("other") <= 1


async def test_without_the_credential_headers_say_nothing(slow: Frontend) -> None:
    """Anybody could have put himself before all others, or read another tenant's cache timing."""
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("first", {}, {}),
        ("second", {}, {"x-headrace-priority": "-9", "x-headrace-tenant": "other"}),
    ]
    assert await order_of(slow, asked, gateway_credential=SECRET) == ["first", "second"]
    assert await order_of(slow, asked) == ["first", "second"]


async def test_the_gateways_priority_and_timeout_hold(slow: Frontend) -> None:
    gateway = {"x-headrace-gateway": SECRET}
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("cheats", {"priority": -9}, gateway | {"x-headrace-priority": "7"}),
        ("honest", {}, gateway),
    ]
    assert await order_of(slow, asked, gateway_credential=SECRET) == ["honest", "cheats"]
    async with connected(small_app(slow, gateway_credential=SECRET)) as client:
        late = await client.post(
            TEXT,
            json=ENDLESS | {"timeout_s": 60.0},
            headers=gateway | {"x-headrace-timeout-s": "0.1"},
        )
    assert late.status_code == 504


async def test_the_gateways_salt_keeps_caches_apart() -> None:
    frontend = small_frontend()
    prompt = {"prompt": "a" * 100, "max_tokens": 1}

    async def cached(client: httpx.AsyncClient, salt: str) -> int:
        headers = {"x-headrace-gateway": SECRET, "x-headrace-cache-salt": salt}
        usage = (await client.post(TEXT, json=prompt, headers=headers)).json()["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    async with connected(small_app(frontend, gateway_credential=SECRET)) as client:
        assert [await cached(client, salt) for salt in ("x", "y", "x")] == [0, 0, 96]
    frontend.close()


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"x-headrace-gateway": "guess"}, 401, "x-headrace-gateway"),
        ({"x-headrace-gateway": SECRET, "x-headrace-priority": "1.5"}, 400, "x-headrace-priority"),
        ({"x-headrace-gateway": SECRET, "x-headrace-timeout-s": "nan"}, 400, "x-headrace-timeout-s"),
        ({"x-headrace-gateway": SECRET, "x-headrace-tenant-weight": "0"}, 400, "x-headrace-tenant-weight"),
    ],
)
async def test_a_gateway_that_is_wrong_is_told(
    slow: Frontend, headers: dict[str, str], status: int, word: str
) -> None:
    async with connected(small_app(slow, gateway_credential=SECRET)) as client:
        response = await client.post(TEXT, json=ENDLESS, headers=headers)
    assert response.status_code == status
    assert word in error_of(response)["message"]
    assert SECRET not in json.dumps(error_of(response))
