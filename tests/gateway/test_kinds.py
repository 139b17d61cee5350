"""Upstreams of all kinds: what each is asked, how its words are read, and what only some of them can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running import RunningGateway, Upstreams, decent, events, gateway, text_of
from tests.lab.streaming_server import Exchange, Streamer

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object"}},
}


def event(kind: str, **fields: Any) -> bytes:
    """An event of Anthropic's."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def usage(**counts: int) -> dict[str, int]:
    return {"input_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2} | counts


class Claude:
    """Answers as Anthropic's API does; what to say is the test's."""

    def __init__(self) -> None:
        self.text: list[str] = ["Hel", "lo"]
        self.calls: list[tuple[str, list[str]]] = []
        self.stop = "end_turn"
        self.breaks = False

    async def __call__(self, exchange: Exchange) -> None:
        assert exchange.path == "/v1/messages"
        if exchange.headers.get("x-api-key") != "secret":
            error = {"type": "authentication_error", "message": "invalid x-api-key"}
            await exchange.whole(401, json.dumps({"type": "error", "error": error}).encode())
            return
        assert exchange.headers["anthropic-version"] == "2023-06-01"
        if exchange.body.get("stream"):
            await self._stream(exchange)
        else:
            content: list[dict[str, Any]] = [{"type": "thinking", "thinking": "hm", "signature": "x"}]
            content += [{"type": "text", "text": "".join(self.text)}] if self.text else []
            content += [
                {
                    "type": "tool_use",
                    "id": f"toolu_{n}",
                    "name": name,
                    "input": json.loads("".join(parts) or "{}"),
                }
                for n, (name, parts) in enumerate(self.calls)
            ]
            message = {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "claude",
                "content": content,
            }
            message |= {"stop_reason": self.stop, "usage": usage(output_tokens=7)}
            await exchange.whole(200, json.dumps(message).encode())

    async def _stream(self, exchange: Exchange) -> None:
        exchange.begin()
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": []}
        await exchange.send(event("message_start", message=message | {"usage": usage(output_tokens=1)}))
        await exchange.send(event("ping"))
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
            ({"type": "thinking", "thinking": ""}, [{"type": "thinking_delta", "thinking": "hm"}])
        ]
        if self.text:
            said = [{"type": "text_delta", "text": part} for part in self.text]
            blocks.append(({"type": "text", "text": ""}, said))
        for n, (name, parts) in enumerate(self.calls):
            given = [{"type": "input_json_delta", "partial_json": part} for part in ["", *parts]]
            blocks.append(({"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": {}}, given))
        for index, (block, deltas) in enumerate(blocks):
            await exchange.send(event("content_block_start", index=index, content_block=block))
            for delta in deltas:
                await exchange.send(event("content_block_delta", index=index, delta=delta))
            await exchange.send(event("content_block_stop", index=index))
        if self.breaks:
            await exchange.send(event("error", error={"type": "overloaded_error", "message": "Overloaded"}))
        else:
            end = {"stop_reason": self.stop, "stop_sequence": None}
            await exchange.send(event("message_delta", delta=end, usage={"output_tokens": 7}))
            await exchange.send(event("message_stop"))
        await exchange.end()


Cloud = tuple[RunningGateway, Claude, Streamer]


@pytest.fixture(scope="module")
def cloud(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    claude = Claude()
    streamer, url = upstreams.start(claude)
    upstream = {"url": url, "kind": "anthropic", "api_key_env": "KEY", "models": {"m": {"name": "claude"}}}
    config = {
        "upstreams": {"cloud": upstream},
        "authentication": "none",
        "health": {"eject_after": 1000},
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway"), env={"KEY": "secret"}) as made:
        yield made, claude, streamer


def test_a_chat_is_put_into_anthropics_words(cloud: Cloud) -> None:
    made, _, streamer = cloud
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    link = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": [{"type": "text", "text": "And short."}]},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image, link]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    settings: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "stop": "END", "user": "u", "seed": 1}
    made.chat(messages=messages, max_tokens=20, tools=[WEATHER], tool_choice="required", **settings)
    assert streamer.asked[-1].body == {
        "model": "claude",
        "max_tokens": 20,
        "system": "Be kind.\n\nAnd short.",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Hi"},
                    {"type": "text", "text": "What is this?"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"town": "Ulm"}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "temperature": 1.0,
        "top_p": 0.9,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "tools": [{"name": "weather", "description": "of a town", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    }
    made.chat(max_tokens=None, tools=[WEATHER], parallel_tool_calls=False)
    body = streamer.asked[-1].body
    assert body["max_tokens"] == 1024, "it has to be told, and this is what was reserved"
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    named = {"type": "function", "function": {"name": "weather"}}
    made.chat(tools=[WEATHER], tool_choice=named)
    assert streamer.asked[-1].body["tool_choice"] == {"type": "tool", "name": "weather"}


@pytest.mark.parametrize(
    ("stop", "reason"),
    [("end_turn", "stop"), ("max_tokens", "length"), ("refusal", "content_filter"), ("new", "stop")],
)
def test_an_answer_of_anthropics_is_as_openais(cloud: Cloud, stop: str, reason: str) -> None:
    made, claude, _ = cloud
    claude.text, claude.calls, claude.stop = ["Hel", "lo"], [], stop
    whole = made.chat().json()
    [choice] = whole["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello"},
        "finish_reason": reason,
    }
    expected = {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
    assert whole["usage"] == expected | {"prompt_tokens_details": {"cached_tokens": 3}}
    stream = made.chat(stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(data) for data in events(stream)[:-1]]
    assert {chunk["id"] for chunk in chunks} == {"msg_1"}
    assert chunks[-1]["usage"] == whole["usage"]
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "Hello"
    assert [delta["finish_reason"] for delta in deltas] == [None, None, None, reason]
    assert events(stream)[-1] == "[DONE]"


def test_calls_of_anthropics_are_as_openais(cloud: Cloud) -> None:
    made, claude, _ = cloud
    claude.text, claude.stop = [], "tool_use"
    claude.calls = [("weather", ['{"town"', ': "Ulm"}']), ("time", [])]
    [choice] = made.chat(tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]
    ]
    assert calls == [("toolu_0", "weather", '{"town":"Ulm"}'), ("toolu_1", "time", "{}")]
    chunks = [json.loads(data) for data in events(made.chat(tools=[WEATHER], stream=True))[:-1]]
    news = [c for chunk in chunks for one in chunk["choices"] for c in one["delta"].get("tool_calls", ())]
    assert [(one["index"], one["id"], one["function"]["name"]) for one in news if "id" in one] == [
        (0, "toolu_0", "weather"),
        (1, "toolu_1", "time"),
    ]
    arguments = ["".join(one["function"]["arguments"] for one in news if one["index"] == n) for n in (0, 1)]
    assert arguments == ['{"town": "Ulm"}', "{}"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_anthropics_api_cannot_is_not_asked_of_it(cloud: Cloud) -> None:
    made, claude, streamer = cloud
    asked = len(streamer.asked)
    for body in ({"n": 2}, {"logprobs": True}, {"response_format": {"type": "json_object"}}):
        refused = made.chat(**body)
        assert refused.status_code == 400
        assert f"`{next(iter(body))}`" in refused.json()["error"]["message"]
    text = made.client.post("/v1/completions", json={"model": "m", "prompt": "a"})
    assert (text.status_code, "completions" in text.json()["error"]["message"]) == (400, True)
    wrong = made.chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
    assert len(streamer.asked) == asked
    claude.text, claude.calls, claude.breaks = ["Hel"], [], True
    try:
        assert "Overloaded" in made.chat(stream=True).text
    finally:
        claude.breaks = False
    made.wait_idle()


def config_of(**upstreams: dict[str, Any]) -> dict[str, Any]:
    return {"upstreams": upstreams, "authentication": "none", "cache": {"enabled": False}}


def test_requests_go_where_they_can_be_served(upstreams: Upstreams, tmp_path: Path) -> None:
    urls = [upstreams.start()[1] for _ in range(3)]
    config = config_of(
        texts={"url": urls[0], "weight": 1000, "models": {"m": {"serves": ["chat", "completions"]}}},
        tools={"url": urls[1], "weight": 10, "models": {"m": {"serves": ["chat", "tools"]}}},
        vectors={
            "url": urls[2],
            "models": {"m": {"serves": ["embeddings"]}, "v": {"serves": ["embeddings"]}},
        },
    )
    with gateway(config, tmp_path) as made:
        assert made.chat().headers["x-headrace-upstream"] == "texts"
        assert made.chat(tools=[WEATHER]).headers["x-headrace-upstream"] == "tools"
        assert made.chat(tools=[WEATHER], tool_choice="none").headers["x-headrace-upstream"] == "texts"
        vector = made.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
        assert vector.headers["x-headrace-upstream"] == "vectors"
        refused = made.chat(model="v")
        assert refused.status_code == 400
        assert "no upstream of v can do what is asked (chat)" in refused.json()["error"]["message"]


def test_contexts_are_asked_of_upstreams_that_tell_them(upstreams: Upstreams, tmp_path: Path) -> None:
    (short, short_url), (long, long_url), (file, file_url) = (upstreams.start() for _ in range(3))
    short.models = (200, b'{"data": [{"id": "s", "max_model_len": 100}]}', "application/json")
    long.models = (200, b'{"data": [{"id": "m", "meta": {"n_ctx": 4000}}]}', "application/json")
    file.models = (200, b'{"data": [{"id": "/a/f.gguf", "meta": {"n_ctx": 2048}}]}', "application/json")
    config = config_of(
        short={"url": short_url, "weight": 1000, "models": {"m": {"name": "s"}}},
        long={"url": long_url, "models": {"m": {}}},
        file={"url": file_url, "kind": "llamacpp", "models": {"f": {}}},
    )
    with gateway(config, tmp_path) as made:
        made.wait(lambda: made.client.get("/v1/models/m").json()["max_model_len"] == 4000)
        made.wait(lambda: made.client.get("/v1/models/f").json()["max_model_len"] == 2048)
        assert made.chat().headers["x-headrace-upstream"] == "short"
        assert made.chat(max_tokens=300).headers["x-headrace-upstream"] == "long"


# what a client sends, and what the kind of upstream is sent
LIMITS = {
    "compatible": ("max_tokens", "max_tokens"),
    "headrace": ("max_completion_tokens", "max_completion_tokens"),
    "vllm": ("max_completion_tokens", "max_completion_tokens"),
    "sglang": ("max_completion_tokens", "max_completion_tokens"),
    "trtllm": ("max_completion_tokens", "max_completion_tokens"),
    "llamacpp": ("max_completion_tokens", "max_completion_tokens"),
    "tgi": ("max_completion_tokens", "max_tokens"),
    "deepspeed": ("max_completion_tokens", "max_tokens"),
    "onnxruntime": ("max_completion_tokens", "max_tokens"),
    "ollama": ("max_completion_tokens", "max_tokens"),
    "openai": ("max_tokens", "max_completion_tokens"),
}


def test_each_kind_is_asked_in_its_words(upstreams: Upstreams, tmp_path: Path) -> None:
    started = {kind: upstreams.start(decent) for kind in LIMITS}
    config = config_of(
        **{kind: {"url": url, "kind": kind, "models": {kind: {}}} for kind, (_, url) in started.items()}
    )
    with gateway(config, tmp_path) as made:
        for kind, (sent, known) in LIMITS.items():
            body = {"model": kind, "stream": True, "messages": [{"role": "user", "content": "a"}], sent: 3}
            answer = made.client.post("/v1/chat/completions", json=body)
            assert text_of(answer) == "word0 word1 word2 ", kind
            asked = started[kind][0].asked[-1].body
            assert asked["stream_options"] == {"include_usage": True}
            limits = {"max_tokens", "max_completion_tokens"} & asked.keys()
            assert (limits, asked[known]) == ({known}, 3), kind
