"""vLLM's extensions over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace import LLM, BeamSearchParams
from headrace.engine.config import SpeculativeConfig
from headrace.frontend.frontend import Frontend
from tests.server.small_server import (
    EOS,
    RawClient,
    connected,
    events,
    idle,
    small_app,
    small_frontend,
    until,
)

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
ASK = {"prompt": "abc", "max_tokens": 8, "seed": 1, "ignore_eos": True}


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    made = small_frontend(speculative=SpeculativeConfig(prompt_lookup_min=1, adaptive=False))
    yield made
    made.close()


async def post(frontend: Frontend, path: str, body: dict[str, Any]) -> httpx.Response:
    async with connected(small_app(frontend)) as client:
        return await client.post(path, json=body)


async def test_echo_with_the_logprobs_of_the_prompt(frontend: Frontend) -> None:
    """What evaluation harnesses ask for: how likely is this text?"""
    body = ASK | {"prompt": ["abc", "hello"], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 3}
    answer = (await post(frontend, TEXT, body)).json()
    plain = (await post(frontend, TEXT, body | {"echo": False})).json()
    assert len(answer["choices"]) == 4
    for choice, without in zip(answer["choices"], plain["choices"], strict=True):
        prompt = "abc" if choice["index"] < 2 else "hello"
        size = len(prompt)
        logprobs = choice["logprobs"]
        assert choice["text"] == prompt + without["text"]
        assert "".join(logprobs["tokens"][:size]) == prompt
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["token_logprobs"][size:] == without["logprobs"]["token_logprobs"]
        assert logprobs["text_offset"][:size] == list(range(size))
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
        assert "prompt_logprobs" not in choice
    assert answer["usage"] == plain["usage"]


async def test_prompt_logprobs_as_in_vllm(frontend: Frontend) -> None:
    text = (await post(frontend, TEXT, ASK | {"prompt_logprobs": 1})).json()
    [choice] = text["choices"]
    assert len(choice["prompt_logprobs"]) == 3
    assert choice["prompt_logprobs"][0] is None
    letters = [
        [candidate["decoded_token"] for candidate in place.values()]
        for place in choice["prompt_logprobs"][1:]
    ]
    assert "b" in letters[0]
    assert "c" in letters[1]
    assert {c["rank"] for place in choice["prompt_logprobs"][1:] for c in place.values()} <= {1, None}
    chat = (await post(frontend, CHAT, {"messages": USER, "max_tokens": 2, "prompt_logprobs": 0})).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_what_shapes_the_answer(frontend: Frontend) -> None:
    ids = frontend.encode_prompt("xyz")
    answer = (await post(frontend, TEXT, ASK | {"allowed_token_ids": ids, "max_tokens": 60})).json()
    text = answer["choices"][0]["text"]
    assert set(text) <= set("xyz")
    stop = text[5:8]
    upto = text[: text.index(stop) + 3]
    body = ASK | {"allowed_token_ids": ids, "max_tokens": 60, "stop": stop}
    cut = (await post(frontend, TEXT, body | {"include_stop_str_in_output": True})).json()
    assert cut["choices"][0]["text"] == upto
    clean = (await post(frontend, TEXT, body | {"stop": None, "bad_words": [stop, "x"]})).json()
    assert stop not in clean["choices"][0]["text"]
    assert set(clean["choices"][0]["text"]) == set("yz")


async def test_special_tokens_are_shown_on_request(frontend: Frontend) -> None:
    body = ASK | {"allowed_token_ids": [EOS], "max_tokens": 2}
    assert (await post(frontend, TEXT, body)).json()["choices"][0]["text"] == ""
    shown = (await post(frontend, TEXT, body | {"skip_special_tokens": False})).json()
    assert shown["choices"][0]["text"] == "<end><end>"


async def test_a_prompt_cut_to_its_end(frontend: Frontend) -> None:
    body = ASK | {"prompt": "x" * 5000 + "tail", "truncate_prompt_tokens": 4, "echo": True}
    answer = (await post(frontend, TEXT, body)).json()
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][0]["text"].startswith("tail")
    chat = {"messages": USER, "max_tokens": 2, "truncate_prompt_tokens": -1}
    assert (await post(frontend, CHAT, chat)).json()["usage"]["prompt_tokens"] == len("<user>hi\n<assistant>")


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "unsupported_parameter"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"bad_words": [""]}, "bad_words", "invalid_value"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "invalid_value"),
    ],
)
async def test_bad_values(frontend: Frontend, changes: dict[str, Any], param: str, code: str) -> None:
    response = await post(frontend, TEXT, ASK | changes)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


async def test_drafts_in_the_metrics_and_several_tokens_in_a_chunk(frontend: Frontend) -> None:
    ids = frontend.encode_prompt("x")
    body = ASK | {"prompt": "xxxxxx", "allowed_token_ids": ids, "max_tokens": 40}
    whole = (await post(frontend, TEXT, body)).json()
    assert whole["choices"][0]["text"] == "x" * 40
    streamed = await post(frontend, TEXT, body | {"stream": True})
    chunks = events(streamed.text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 40
    assert len(chunks) < 20
    async with connected(small_app(frontend)) as client:
        page = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    drafted = float(values['headrace_draft_tokens_total{model_name="small"}'])
    accepted = float(values['headrace_draft_tokens_accepted_total{model_name="small"}'])
    assert drafted >= accepted > 60
    assert float(values['vllm:spec_decode_num_draft_tokens_total{model_name="small"}']) == drafted
    per_position = [
        float(values[f'headrace_draft_tokens_accepted_per_pos_total{{model_name="small",position="{at}"}}'])
        for at in range(16)
    ]
    assert sum(per_position) == accepted


async def test_beams(frontend: Frontend) -> None:
    """The n best answers, best first, the same as in Python."""
    llm = LLM.from_frontend(frontend)
    beams = BeamSearchParams(beam_width=4, max_tokens=7, length_penalty=0.5)
    expected = [output.text for output in llm.beam_search("abc", beams)[0].outputs]
    body = {"prompt": ["abc", "x"], "max_tokens": 7, "use_beam_search": True, "num_beams": 4}
    answer = (await post(frontend, TEXT, body | {"n": 3, "length_penalty": 0.5})).json()
    assert [choice["text"] for choice in answer["choices"][:3]] == expected[:3]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] <= 42
    chat = {"messages": USER, "max_tokens": 3, "n": 2, "use_beam_search": True, "early_stopping": "never"}
    assert len((await post(frontend, CHAT, chat)).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"n": 3, "num_beams": 2}, "n"),
        ({"n": 11}, "n"),
        ({"num_beams": 11}, "num_beams"),
        ({"use_beam_search": False, "num_beams": 2}, "num_beams"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
async def test_bad_beams(frontend: Frontend, changes: dict[str, Any], param: str) -> None:
    response = await post(frontend, TEXT, {"prompt": "abc", "use_beam_search": True} | changes)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_leaving_ends_the_beams() -> None:
    """Whoever closed the connection left a search running to its end."""
    frontend = small_frontend(step_s=0.01)
    body = {"prompt": "abc", "max_tokens": 400, "use_beam_search": True, "num_beams": 3, "ignore_eos": True}
    client = RawClient(small_app(frontend), TEXT, body)
    await until(lambda: frontend.client.stats().generation_tokens > 20)
    client.leave()
    await client.task
    await until(lambda: idle(frontend))
    made = frontend.client.stats().generation_tokens
    assert made < 300
    frontend.close()
