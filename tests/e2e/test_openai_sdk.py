"""The openai SDK against the running server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.e2e.running import RunningServer

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=20)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3
    assert answer.system_fingerprint


def test_a_stream_adds_up_to_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == ["stop"]
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text


def test_two_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=2,
            seed=7,
            temperature=1,
            max_tokens=24,
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert first[0] != first[1]
    assert ask() == first


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 6
    for token in content:
        assert token.logprob <= 0
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two,", temperature=0, max_tokens=5, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text


def test_stop_strings(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three, four,", temperature=0, max_tokens=40, stop=["seven", "eight"]
    )
    (choice,) = answer.choices
    assert "six" in choice.text
    assert "seven" not in choice.text
    assert choice.finish_reason == "stop"


@pytest.mark.anyio
async def test_32_at_once_answer_as_each_alone(server: RunningServer) -> None:
    """Streaming and not; what a request says does not depend on its neighbours."""
    prompts = [f"{number} is a number. The next number is" for number in range(32)]

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int, stream: bool) -> str:
            if not stream:
                answer = await client.completions.create(
                    model=MODEL, prompt=prompts[number], max_tokens=12, seed=number
                )
                return answer.choices[0].text
            text = ""
            async for chunk in await client.completions.create(
                model=MODEL, prompt=prompts[number], max_tokens=12, seed=number, stream=True
            ):
                text += chunk.choices[0].text
            return text

        together = await asyncio.gather(*(ask(number, number % 2 == 0) for number in range(32)))
        for number in (0, 1, 16, 31):
            assert await ask(number, False) == together[number]
    server.wait_idle()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-nothing", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt=" word" * 9000, stream=True)
    assert too_long.value.code == "context_length_exceeded"
