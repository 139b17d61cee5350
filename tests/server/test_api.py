"""The OpenAI routes from outside: shapes, streams, errors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.small_server import MAX_MODEL_LEN, connected, events, small_app, small_frontend

USER = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
def frontend():
    made = small_frontend()
    yield made
    made.close()


@pytest.fixture
def app(frontend):
    return small_app(frontend, max_body_bytes=20_000)


async def post(app: Any, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    async with connected(app) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body, **kwargs)
        return await client.post(path, json=body, **kwargs)


async def test_chat_has_the_shape_of_openai(app) -> None:
    response = await post(app, CHAT, {"model": "small", "messages": USER, "max_tokens": 5, "seed": 1})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "small"
    assert body["system_fingerprint"]
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("length", "stop")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len("<user>hi\n<assistant>")
    assert usage["completion_tokens"] <= 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert response.headers["x-request-id"].startswith("req-")
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_a_stream_says_the_same_as_the_whole_answer(app) -> None:
    asked = {"messages": USER, "max_tokens": 40, "seed": 3, "n": 3, "ignore_eos": True}
    whole = (await post(app, CHAT, asked)).json()
    response = await post(app, CHAT, asked | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 120
    texts, ends = ["", "", ""], [0, 0, 0]
    seen = set()
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["usage"] is None
        assert chunk["id"] == chunks[0]["id"]
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert (choice["delta"].get("role") == "assistant") == (index not in seen), "role comes first, once"
        seen.add(index)
        texts[index] += choice["delta"].get("content", "")
        ends[index] += choice["finish_reason"] is not None
    assert ends == [1, 1, 1]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
async def test_usage_so_far_in_every_chunk_as_load_generators_ask(app, route: str) -> None:
    asked = {"messages": USER} if route == CHAT else {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked |= {"max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options}
    *chunks, last, _ = events((await post(app, route, asked)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 6
    assert len(counts) >= len(chunks) - 1  # all but the one that only names the role


async def test_usage_is_streamed_only_when_asked_for(app) -> None:
    response = await post(app, CHAT, {"messages": USER, "max_tokens": 3, "stream": True})
    assert all("usage" not in chunk for chunk in events(response.text)[:-1])


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), (["ab", "cd"], 2), ([1, 2, 3], 1), ([[1, 2], [3], [4, 5]], 3)],
)
async def test_every_form_of_prompt(app, prompt: Any, count: int) -> None:
    body = (await post(app, TEXT, {"prompt": prompt, "max_tokens": 4, "n": 2, "ignore_eos": True})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    assert body["usage"]["completion_tokens"] == 4 * 2 * count


async def test_several_prompts_in_one_stream(app) -> None:
    asked = {"prompt": ["ab", "cd", "ef"], "max_tokens": 9, "seed": 5, "ignore_eos": True, "n": 2}
    whole = (await post(app, TEXT, asked)).json()
    response = await post(app, TEXT, asked | {"stream": True})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    texts = [""] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


async def test_echo_puts_the_prompt_first(app) -> None:
    asked = {"prompt": ["ab", "cd"], "max_tokens": 3, "seed": 1, "ignore_eos": True}
    plain = (await post(app, TEXT, asked)).json()["choices"]
    echoed = (await post(app, TEXT, asked | {"echo": True})).json()["choices"]
    assert [c["text"] for c in echoed] == ["ab" + plain[0]["text"], "cd" + plain[1]["text"]]
    streamed = events((await post(app, TEXT, asked | {"echo": True, "stream": True})).text)
    first = "".join(c["text"] for e in streamed[:-1] for c in e["choices"] if c["index"] == 0)
    assert first == echoed[0]["text"]


async def test_chat_logprobs(app) -> None:
    asked = {"messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    (choice,) = (await post(app, CHAT, asked)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["bytes"] == list(entry["token"].encode()) or "�" in entry["token"]
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]


async def test_completion_logprobs_streamed_and_whole(app) -> None:
    asked = {"prompt": "ab", "max_tokens": 6, "logprobs": 2, "seed": 4, "ignore_eos": True}
    (choice,) = (await post(app, TEXT, asked)).json()["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][0] == 0
    assert all(2 <= len(tops) <= 3 for tops in logprobs["top_logprobs"])
    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in events((await post(app, TEXT, asked | {"stream": True})).text)[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == logprobs


async def test_stop_strings_and_stop_tokens_end_the_text(app) -> None:
    asked = {"prompt": "ab", "max_tokens": 60, "seed": 2, "ignore_eos": True}
    text = (await post(app, TEXT, asked)).json()["choices"][0]["text"]
    stop = text[20:22]
    (choice,) = (await post(app, TEXT, asked | {"stop": stop})).json()["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_models_are_listed_under_every_name(frontend) -> None:
    app = small_app(frontend, served_model_names=("one", "org/two"))
    async with connected(app) as client:
        listed = (await client.get("/v1/models")).json()
        assert [(card["id"], card["object"]) for card in listed["data"]] == [
            ("one", "model"),
            ("org/two", "model"),
        ]
        assert (await client.get("/v1/models/org/two")).json()["max_model_len"] == MAX_MODEL_LEN
        assert (await client.get("/v1/models/three")).json()["error"]["code"] == "model_not_found"
    response = await post(app, CHAT, {"model": "org/two", "messages": USER, "max_tokens": 1})
    assert response.json()["model"] == "org/two"
    response = await post(app, CHAT, {"model": "small", "messages": USER})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
        (CHAT, b"{", 400, "invalid_value", None),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "context_length_exceeded", None),
        (TEXT, {"prompt": "x" * 600, "stream": True}, 400, "context_length_exceeded", None),
        (TEXT, {"prompt": ["a", "x" * 600], "stream": True}, 400, "context_length_exceeded", None),
        (TEXT, {"prompt": ""}, 400, "invalid_value", "prompt"),
        (TEXT, {"prompt": [99999]}, 400, "invalid_value", "prompt"),
        (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "invalid_value", "logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": [99999]}, 400, "invalid_value", "stop_token_ids"),
        (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "invalid_value", "min_tokens"),
        (TEXT, {"prompt": ["a"] * 300}, 400, "invalid_value", "prompt"),
        (TEXT, b'{"prompt": "\\ud800"}', 400, "invalid_value", None),
        (TEXT, {"prompt": "x" * 30_000}, 413, "payload_too_large", None),
        (TEXT, {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"tools": []}}, 400, None, "chat_template_kwargs"),
        ("/v1/nothing", {}, 404, "not_found", None),
        ("/health", {}, 405, "method_not_allowed", None),
    ],
)
async def test_errors_have_the_body_of_openai(app, frontend, path, body, status, code, param) -> None:
    """Also when a stream was asked for: no byte of SSE before the request is known to be good."""
    response = await post(app, path, body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    assert (await post(app, TEXT, {"prompt": "a", "max_tokens": 2})).status_code == 200


async def test_an_over_long_prompt_is_told_both_counts(app) -> None:
    message = (await post(app, TEXT, {"prompt": "x" * 600})).json()["error"]["message"]
    assert "600" in message
    assert str(MAX_MODEL_LEN) in message


async def test_a_lying_content_length_changes_nothing(app) -> None:
    """The body is counted as it comes."""

    async def chunks():
        for _ in range(100):
            yield b" " * 1000

    async with connected(app) as client:
        response = await client.post(TEXT, content=chunks(), headers={"content-length": "10"})
    assert response.status_code == 413


async def test_a_base_model_says_to_use_completions() -> None:
    frontend = small_frontend(chat_template=None)
    try:
        response = await post(small_app(frontend), CHAT, {"messages": USER})
        assert response.status_code == 400
        assert "completions" in response.json()["error"]["message"]
    finally:
        frontend.close()


async def test_request_ids_are_kept_if_sane(app) -> None:
    kept = await post(app, TEXT, {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    made = await post(app, TEXT, {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "no spaces"})
    assert made.headers["x-request-id"].startswith("req-")


async def test_the_api_key_guards_v1_only(frontend) -> None:
    app = small_app(frontend, api_key="secret")
    async with connected(app) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = await client.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        granted = await client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert granted.status_code == 200


async def test_the_documentation_has_the_request_schemas(app) -> None:
    async with connected(app) as client:
        schema = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert "messages" in schema["components"]["schemas"]["ChatCompletionRequest"]["required"]


async def test_metrics_count_what_was_served(app) -> None:
    asked = {"prompt": "abc", "max_tokens": 7, "n": 2, "ignore_eos": True}
    assert (await post(app, TEXT, asked)).status_code == 200
    assert (await post(app, TEXT, {"prompt": ""})).status_code == 400
    async with connected(app) as client:
        page = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    label = '{model_name="small"}'
    assert float(values[f"vllm:request_generation_tokens_sum{label}"]) == 14
    assert float(values[f"vllm:request_prompt_tokens_sum{label}"]) == 3
    assert float(values[f"vllm:time_to_first_token_seconds_count{label}"]) == 1
    assert float(values[f"vllm:request_queue_time_seconds_count{label}"]) == 1
    assert float(values[f"vllm:request_prefill_time_seconds_count{label}"]) == 1
    assert float(values['vllm:request_success_total{finished_reason="length",model_name="small"}']) == 2
    assert float(values['headrace_http_requests_total{route="/v1/completions",status="400"}']) == 1
