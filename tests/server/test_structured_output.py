"""Structured output and tool calls over HTTP, of a model that says random bytes unless it is constrained."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.small_server import connected, events, idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 22, None]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    frontend = small_frontend(max_model_len=1500)
    async with connected(small_app(frontend)) as made:
        yield made
    await until(lambda: idle(frontend))
    frontend.close()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


@pytest.mark.parametrize(
    "asks",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_schema_in_every_spelling(client: httpx.AsyncClient, path: str, asks: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    answer = await post(client, path, **prompt, **asks, n=3, seed=1, max_tokens=300)
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None


async def test_a_schema_that_refers_to_itself(client: httpx.AsyncClient) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": None}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    answer = await post(client, COMPLETIONS, prompt="hi", guided_json=schema, n=6, seed=1, max_tokens=1000)
    texts = [choice["text"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert max(text.count("{") for text in texts) > 1


@pytest.mark.parametrize(
    ("asks", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}x?"}, "[a-c]{3}x?"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9] [0-9]'}, "a[0-9]{2}"),
        ({"structured_outputs": {"regex": "\u00e9+"}, "max_tokens": 5, "min_tokens": 1}, "\u00e9*.?"),
    ],
)
async def test_other_kinds(client: httpx.AsyncClient, asks: dict[str, Any], pattern: str) -> None:
    answer = await post(client, COMPLETIONS, prompt="hi", **{"max_tokens": 50} | asks)
    assert re.fullmatch(pattern, answer["choices"][0]["text"])


async def test_a_stream_says_the_same(client: httpx.AsyncClient) -> None:
    asks = {"messages": USER, "seed": 3, "guided_json": SCHEMA, "max_tokens": 300}
    whole = await post(client, CHAT, **asks)
    chunks = events((await client.post(CHAT, json=asks | {"stream": True})).text)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c != "[DONE]")
    assert text == whole["choices"][0]["message"]["content"]


async def test_stop_strings_still_end_the_text(client: httpx.AsyncClient) -> None:
    answer = await post(client, COMPLETIONS, prompt="hi", guided_regex="abcdef", stop="de")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")


@pytest.mark.parametrize(
    ("asks", "param", "says"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wob"}}}},
            *("response_format", "wob"),
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "other format"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            *("tool_choice", "'get_weather', 'now'"),
        ),
        ({"tools": TOOLS + TOOLS}, "tools", "two functions"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    *TOOLS,
                    {"type": "function", "function": {"name": "bad", "parameters": {"type": "array"}}},
                ],
            },
            *("tools", "'bad'"),
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    *TOOLS,
                    {"type": "function", "function": {"name": "bad", "parameters": {"not": {}}}},
                ],
            },
            *("tools", "parameters of 'bad'"),
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_a_400_that_names_it(
    client: httpx.AsyncClient, asks: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    answer = await client.post(CHAT, json={"messages": USER, "stream": stream} | asks)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


async def test_beams_follow_no_grammar(client: httpx.AsyncClient) -> None:
    asks = {"prompt": "hi", "guided_regex": "a", "use_beam_search": True, "max_tokens": 4}
    answer = await client.post(COMPLETIONS, json=asks)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"


def check_call(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
    else:
        assert call["function"]["name"] == "get_weather"
        jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
        assert set(arguments) == {"city", "unit"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parallel", [None, False])
async def test_calls_that_are_a_must(client: httpx.AsyncClient, choice: Any, parallel: bool | None) -> None:
    answer = await post(
        client,
        CHAT,
        messages=USER,
        tools=TOOLS,
        tool_choice=choice,
        n=4,
        seed=1,
        **({} if parallel is None else {"parallel_tool_calls": parallel}),
    )
    for each in answer["choices"]:
        message = each["message"]
        assert message["content"] is None
        for call in message["tool_calls"]:
            check_call(call)
        assert each["finish_reason"] == "tool_calls" or (each["finish_reason"], parallel) == ("length", None)
        if choice != "required":
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
        elif parallel is False:
            assert len(message["tool_calls"]) == 1


async def test_streamed_calls_add_up(client: httpx.AsyncClient) -> None:
    asks = {
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 5,
        "parallel_tool_calls": False,
    }
    whole = (await post(client, CHAT, **asks))["choices"][0]["message"]["tool_calls"]
    calls: list[dict[str, Any]] = []
    reasons = []
    chunks = events((await client.post(CHAT, json=asks | {"stream": True})).text)
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert not choice["delta"].get("content")
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["type"] == "function"
                calls.append({"id": delta["id"], "type": "function", "function": {"arguments": ""}})
                calls[-1]["function"]["name"] = delta["function"]["name"]
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    assert reasons == ["tool_calls"]
    for call in calls:
        check_call(call)
    assert [call["function"] for call in calls] == [call["function"] for call in whole]


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"Hm. {CALL}", "Hm.", ["now"]),
        (CALL * 2, None, ["now", "now"]),
        ("No call.", "No call.", []),
        (CALL.replace("now", "then"), CALL.replace("now", "then"), []),
    ],
)
async def test_calls_of_a_model_that_may(
    client: httpx.AsyncClient, text: str, content: str | None, names: list[str]
) -> None:
    """The text is forced by ``guided_choice``; whether it is a call is what the parser finds."""
    asks = {"messages": USER, "tools": TOOLS, "guided_choice": [text], "max_tokens": 200}
    [choice] = (await post(client, CHAT, **asks))["choices"]
    assert choice["message"]["content"] == content
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == names
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    [plain] = (await post(client, CHAT, **asks | {"tool_choice": "none"}))["choices"]
    assert plain["message"]["content"] == text
    assert "tool_calls" not in plain["message"]


async def test_tools_and_their_answers_reach_the_prompt(client: httpx.AsyncClient) -> None:
    """A template that knows no tools has them told in words; calls and answers in history count too."""
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]

    async def prompt_tokens(**body: Any) -> int:
        answer = await post(client, CHAT, **{"messages": USER, "max_tokens": 1} | body)
        tokens: int = answer["usage"]["prompt_tokens"]
        return tokens

    short = [{"type": "function", "function": {"name": "f"}}]
    plain = await prompt_tokens()
    assert await prompt_tokens(tools=short) > plain + 100
    assert await prompt_tokens(tools=short, tool_choice="none") == plain
    answer = len("<tool_call>") + len("<tool_response>") + len("noon")
    assert await prompt_tokens(messages=history) > plain + answer


async def test_marks_that_are_control_tokens_are_found() -> None:
    """Control tokens are no text: the mark was dropped, and calls came back as content."""
    template = "[TOOL_CALLS]{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    frontend = small_frontend(max_model_len=1500, chat_template=template, marks=["[TOOL_CALLS]", "<other>"])
    mark = frontend.tokenizer.token_id("[TOOL_CALLS]")
    async with connected(small_app(frontend)) as client:
        asks = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "logprobs": True, "seed": 4}
        answer = await post(client, CHAT, **asks, parallel_tool_calls=False)
        [choice] = answer["choices"]
        [call] = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert choice["message"]["content"] is None
        assert choice["logprobs"]["content"][0]["token"] == "[TOOL_CALLS]"
        assert answer["usage"]["completion_tokens"] < len("[TOOL_CALLS]") + sum(
            len(part) for part in (*call["function"].values(), '[{"name": "", "arguments": }]<')
        ), "the mark is one token"
        grammar = f'start: "Hm. " <[{mark}]> "[{{\\"name\\": \\"now\\", \\"arguments\\": {{}}}}]"'
        answer = await post(client, CHAT, messages=USER, tools=TOOLS, guided_grammar=grammar)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "Hm."
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    frontend.close()


@pytest.mark.parametrize(("parser", "mark"), [("mistral", "[TOOL_CALLS][{"), ("llama3_json", '{"name')])
async def test_other_formats_can_be_chosen(parser: str, mark: str) -> None:
    frontend = small_frontend(max_model_len=1500)
    async with connected(small_app(frontend, tool_call_parser=parser)) as client:
        answer = await post(
            client,
            CHAT,
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            logprobs=True,
        )
        [choice] = answer["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) is not None
        written = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
        assert written.decode().startswith(mark)
    frontend.close()
