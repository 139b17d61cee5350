"""Streams of text over a real engine: deltas, stop strings, ends, aborts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.request import SamplingParams
from headrace.errors import ContextLengthError, EngineDeadError, InvalidRequestError, OverloadedError
from headrace.frontend.frontend import Frontend
from headrace.frontend.outputs import TextOutput
from headrace.frontend.text_request import TextRequest
from tests.frontend.byte_model import EOS, VOCAB

PROMPT = [10, 20, 30]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 7, "ignore_eos": True, **changes})


async def collect(
    frontend: Frontend, settings: SamplingParams, prompt: list[int] = PROMPT
) -> list[TextOutput]:
    """One whole TextOutput per choice, after checking that each ended exactly once."""
    whole = [TextOutput(choice) for choice in range(settings.n)]
    async for outputs in frontend.stream(prompt, settings):
        assert len({output.choice for output in outputs}) == len(outputs) > 0
        for output in outputs:
            total = whole[output.choice]
            assert total.finish_reason is None, "news after the end"
            total.text += output.text
            total.token_ids += output.token_ids
            if output.logprobs is not None:
                total.logprobs = (total.logprobs or []) + output.logprobs
            total.finish_reason, total.stop_reason = output.finish_reason, output.stop_reason
    assert all(total.finish_reason is not None for total in whole)
    return whole


def run(frontend: Frontend, settings: SamplingParams, prompt: list[int] = PROMPT) -> list[TextOutput]:
    return asyncio.run(collect(frontend, settings, prompt))


def wait_until_idle(frontend: Frontend) -> None:
    deadline = time.monotonic() + 60
    while (stats := frontend.client.stats()).num_running_seqs or stats.num_waiting_seqs:
        assert time.monotonic() < deadline, f"still busy: {stats}"
        time.sleep(0.01)
    assert stats.num_free_blocks == stats.num_blocks


def test_the_deltas_make_the_decoded_text(frontend: Frontend) -> None:
    for output in run(frontend, params(n=4)):
        assert len(output.token_ids) == 40
        assert output.text == frontend.tokenizer.decode(output.token_ids)
        assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_eos_ends_without_a_reason_and_is_no_text(frontend: Frontend) -> None:
    [output] = run(frontend, params(ignore_eos=False, logit_bias={EOS: 100.0}))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS], "stop")
    assert output.stop_reason is None


def test_a_stop_token_is_named_and_is_no_text(frontend: Frontend) -> None:
    [free] = run(frontend, params())
    token = free.token_ids[5]
    at = free.token_ids.index(token)
    [output] = run(frontend, params(stop_token_ids=[token]))
    assert output.token_ids == free.token_ids[: at + 1]
    assert output.text == frontend.tokenizer.decode(free.token_ids[:at])
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


def ascii_only(settings: SamplingParams) -> SamplingParams:
    """Bytes that are letters only, so that text and tokens can be told apart by eye."""
    settings.logit_bias = {token: -100.0 for token in range(VOCAB) if not 32 <= token < 64}
    return settings


def test_a_stop_string_ends_its_choice_alone(frontend: Frontend) -> None:
    free = run(frontend, ascii_only(params(n=3)))
    stop = free[1].text[10:13]
    assert stop not in free[0].text
    stopped = run(frontend, ascii_only(params(n=3, stop=[stop, "\x00never"])))
    at = free[1].text.index(stop)
    assert stopped[1].text == free[1].text[:at]
    assert (stopped[1].finish_reason, stopped[1].stop_reason) == ("stop", stop)
    assert stopped[1].token_ids == free[1].token_ids[: at + 3], "tokens after the match are not counted"
    assert stopped[0].text == free[0].text
    wait_until_idle(frontend)


def test_a_stop_string_frees_the_engine_although_nobody_reads(make_frontend: Callable[..., Frontend]) -> None:
    frontend = make_frontend(step_s=0.001)
    [free] = run(frontend, ascii_only(params()))

    async def scenario() -> list[TextOutput]:
        stream = await frontend.start(PROMPT, ascii_only(params(max_tokens=400, stop=[free.text[8:12]])))
        for _ in range(300):
            await asyncio.sleep(0.005)
            if not frontend.client.stats().num_running_seqs and frontend.client.stats().num_steps > 45:
                break
        return [output async for outputs in stream for output in outputs]

    [output] = asyncio.run(scenario())
    assert output.text == free.text[:8]
    assert output.finish_reason == "stop"
    assert frontend.client.stats().generation_tokens < 300


@pytest.mark.parametrize(("stop", "most"), [(None, 4), ("never", 40)])
def test_an_owner_in_no_hurry_is_woken_once_for_many_steps(
    frontend: Frontend, stop: str | None, most: int
) -> None:
    """But at once by a first token, by an end, and by every token that may complete a stop string."""
    wakes: list[object] = []
    ended = threading.Event()

    def wake(request: TextRequest) -> None:
        wakes.append(request)
        if len(wakes) == most:
            ended.set()

    request = frontend.submit(PROMPT, params(stop=stop), wake, gather=16)
    assert ended.wait(30)
    wait_until_idle(frontend)
    request.process()
    assert request.finished and len(wakes) == most
    assert sum(len(output.token_ids) for output in request.take()) == 40


def test_min_tokens_are_not_searched_for_stop_strings(frontend: Frontend) -> None:
    [free] = run(frontend, ascii_only(params()))
    stop = free.text[4]
    later = free.text.find(stop, 10)
    [output] = run(frontend, ascii_only(params(stop=[stop], min_tokens=10)))
    assert output.text == (free.text if later < 0 else free.text[:later])


def test_logprobs_stay_one_per_token_after_a_cut(frontend: Frontend) -> None:
    [free] = run(frontend, ascii_only(params(logprobs=2)))
    [output] = run(frontend, ascii_only(params(logprobs=2, stop=[free.text[6:8]])))
    assert output.logprobs is not None and free.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) <= 8
    assert output.logprobs == free.logprobs[: len(output.logprobs)]


def test_a_slow_reader_gets_merged_deltas(make_frontend: Callable[..., Frontend]) -> None:
    frontend = make_frontend(step_s=0.001)

    async def scenario() -> list[list[TextOutput]]:
        stream = await frontend.start(PROMPT, params(max_tokens=60))
        items = [await anext(stream)]
        while frontend.client.stats().num_running_seqs:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        items += [outputs async for outputs in stream]
        return items

    items = asyncio.run(scenario())
    assert len(items) == 2
    assert sum(len(output.token_ids) for outputs in items for output in outputs) == 60


@pytest.mark.parametrize("how", ["aclose", "cancel", "drop", "break"])
def test_leaving_a_stream_frees_the_engine(make_frontend: Callable[..., Frontend], how: str) -> None:
    frontend = make_frontend(step_s=0.002)

    async def scenario() -> None:
        endless = params(max_tokens=None, n=3)
        if how == "break":
            generator = frontend.stream(PROMPT, endless)
            async for _ in generator:
                break
            await generator.aclose()  # type: ignore[attr-defined]
            return
        stream = await frontend.start(PROMPT, endless)
        await anext(stream)
        if how == "aclose":
            await stream.aclose()
            await stream.aclose()
            assert [item async for item in stream] == []
        elif how == "cancel":

            async def read_all() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read_all())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream
            gc.collect()

    asyncio.run(scenario())
    wait_until_idle(frontend)
    assert frontend.client.stats().generation_tokens < 600


def test_what_is_wrong_is_said_before_anything_runs(frontend: Frontend) -> None:
    async def refused(kind: type[Exception], settings: SamplingParams, prompt: list[int] = PROMPT) -> None:
        with pytest.raises(kind):
            await frontend.start(prompt, settings)

    async def scenario() -> None:
        await refused(InvalidRequestError, params(repetition_penalty=0.0))
        await refused(InvalidRequestError, params(stop=[""]))
        await refused(InvalidRequestError, params(stop_token_ids=[VOCAB]))
        await refused(InvalidRequestError, params(), [])
        await refused(InvalidRequestError, params(), [VOCAB])
        await refused(ContextLengthError, params(), [1] * 600)

    asyncio.run(scenario())
    assert frontend.client.stats().num_steps == 0


@pytest.mark.parametrize("prompt", ["", [], [1, VOCAB], [-1], [10**30], ["a"], [True], [1.0], None, {"a": 1}])
def test_prompts_that_are_none(frontend: Frontend, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        frontend.encode_prompt(prompt)
    assert caught.value.param == "prompt"


def test_half_a_surrogate_pair_is_refused(frontend: Frontend) -> None:
    for text in ("\ud800", "long " * 1000 + "\udfff"):
        with pytest.raises(InvalidRequestError, match="Unicode"):
            frontend.encode_prompt(text)


def test_a_full_queue_refuses_at_once(make_frontend: Callable[..., Frontend]) -> None:
    frontend = make_frontend(step_s=0.01, max_num_seqs=1, max_waiting=2)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as streams:
            with pytest.raises(OverloadedError):
                for _ in range(20):
                    await streams.enter_async_context(await frontend.start(PROMPT, params(max_tokens=100)))

    asyncio.run(scenario())
    wait_until_idle(frontend)


def test_closing_the_frontend_ends_streams(make_frontend: Callable[..., Frontend]) -> None:
    frontend = make_frontend(step_s=0.002)

    async def scenario() -> list[TextOutput]:
        stream = await frontend.start(PROMPT, params(max_tokens=None))
        threading.Timer(0.05, frontend.close).start()
        return [output async for outputs in stream for output in outputs]

    assert asyncio.run(scenario())[-1].finish_reason == "abort"
    frontend.close()  # returns when the engine has ended
    with pytest.raises(EngineDeadError):
        run(frontend, params())


def test_a_closed_event_loop_does_not_keep_its_requests(make_frontend: Callable[..., Frontend]) -> None:
    frontend = make_frontend(step_s=0.01)
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(frontend.start(PROMPT, params(max_tokens=None)))
    time.sleep(0.05)  # so that the loop has been called, and is closed without having come to it
    loop.close()
    wait_until_idle(frontend)
    assert frontend.client.stats().generation_tokens < 100
    del stream


def test_several_loops_and_threads_share_a_frontend(frontend: Frontend) -> None:
    expected = [output.text for output in run(frontend, params(n=2))]
    results: list[list[str]] = []

    async def many() -> None:
        answers = await asyncio.gather(*(collect(frontend, params(n=2)) for _ in range(5)))
        results.extend([output.text for output in answer] for answer in answers)

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 15
    wait_until_idle(frontend)
