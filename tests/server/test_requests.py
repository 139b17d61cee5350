"""Bodies: every way to be wrong gives one error that names the field and says what would be right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError
from headrace.server import requests
from headrace.server.params import chat_params, completion_params
from headrace.server.requests import ChatCompletionRequest, CompletionRequest

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": USER} | fields).encode()


def refused(kind: type[Any], body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        requests.decode(kind, body)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"messages": "\xc3\x28"}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": -Infinity}',
        b"[" * 100_000,
        b'{"metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    error = refused(ChatCompletionRequest, body)
    assert error.status == 400
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "hi"}, "messages", "an array"),
        ({"messages": [7]}, "messages", "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages", "`role` is required"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "messages", "system, developer, user"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "a string or an array"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "text` is required"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1000}, "n", "<= 128"),
        ({"n": "2"}, "n", "an integer"),
        ({"n": True}, "n", "an integer"),
        ({"max_tokens": 10**30}, "max_tokens", "<="),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": 1e308}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"seed": 2**64}, "seed", "<="),
        ({"logit_bias": {"x": 1}}, "logit_bias", "a key of"),
        ({"logit_bias": {"-3": 1}}, "logit_bias", ">= 0"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "<= 100"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": 3}, "stop", "a string or an array"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "`stream`"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options", "include_usage"),
        ({"top_logprobs": 2}, "top_logprobs", "`logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"max_token": 5}, "max_token", "did you mean `max_tokens`"),
        ({"wibble": 5}, "wibble", "unknown parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "`function` is required"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools", "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "length >= 1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "an object"),
        ({"tool_choice": "always"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "`function` is required"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"functions": [{}]}, "functions", "function calls"),
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"typ": "text"}}, "response_format", "unknown parameter `typ`"),
        ({"structured_outputs": {}}, "structured_outputs", "none"),
        ({"structured_outputs": {"rgex": "a"}}, "structured_outputs", "unknown parameter `rgex`"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"guided_choice": []}, "guided_choice", "non-empty"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_choice",
            "`guided_regex` and `guided_choice`",
        ),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "response_format"),
        ({"modalities": ["audio"]}, "modalities", "but text"),
        ({"audio": {"voice": "x"}}, "audio", "not support"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "reasoning"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(ChatCompletionRequest, chat(**fields))
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": None}, "prompt", "a string or an array"),
        ({"prompt": []}, "prompt", "length >= 1"),
        ({"prompt": [[]]}, "prompt", "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt", "strings only"),
        ({"prompt": [1.5]}, "prompt", "prompt[0]"),
        ({"prompt": [-1]}, "prompt", ">= 0"),
        ({"prompt": [[True]]}, "prompt", "prompt[0][0]"),
        ({"prompt": "a", "suffix": "z"}, "suffix", "not support"),
        ({"prompt": "a", "best_of": 3}, "best_of", "not support"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo", "in streams"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "an integer"),
        ({"prompt": "a", "messages": []}, "messages", "unknown parameter"),
    ],
)
def test_a_wrong_completion_field_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(CompletionRequest, json.dumps(fields).encode())
    assert (error.status, error.param) == (400, param)
    assert says in error.message


def test_harmless_parameters_and_nulls_are_taken() -> None:
    """Clients fill in every field they know; what would not change the answer must not break them."""
    body = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        reasoning_effort=None,
        stop=None,
        logit_bias=None,
        n=None,
        temperature=None,
        audio=None,
    )
    params = chat_params(requests.decode(ChatCompletionRequest, body))
    assert (params.n, params.temperature, params.max_tokens, params.logprobs) == (1, 1.0, None, None)


def test_defaults_are_those_of_openai() -> None:
    params = completion_params(requests.decode(CompletionRequest, b'{"prompt": "a"}'))
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)


def test_what_is_asked_reaches_the_engine() -> None:
    asked: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "seed": -5,
        "min_tokens": 3,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
    }
    body = chat(**asked, max_completion_tokens=9, stop="x", logit_bias={"7": -1.5}, logprobs=True)
    params = chat_params(requests.decode(ChatCompletionRequest, body))
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.max_tokens, params.stop, params.logit_bias, params.logprobs) == (9, ["x"], {7: -1.5}, 0)


def test_messages_reach_the_template_as_plain_text() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    request = requests.decode(ChatCompletionRequest, chat(messages=messages))
    assert requests.message_dicts(request.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
known_fields = st.sampled_from(ChatCompletionRequest.__struct_fields__)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(known_fields | st.text(), json_values, max_size=6) | json_values | st.binary())
def test_no_body_raises_anything_else(value: Any) -> None:
    """Whatever comes is a request or an InvalidRequestError: never another exception."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    for kind in (ChatCompletionRequest, CompletionRequest):
        try:
            requests.decode(kind, body)
        except InvalidRequestError as error:
            assert error.message
