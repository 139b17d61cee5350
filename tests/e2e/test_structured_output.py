"""Structured output and tool calls on the default model, through the openai SDK.

The model is far too small to write JSON or call tools on its own: what holds here is the grammar's doing.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from headrace import LLM, SamplingParams, StructuredOutputs
from tests import http
from tests.e2e.running import RunningServer

MODEL = "smollm2-135m"
ALICE = [{"role": "user", "content": "Alice is 31 and lives in Paris. Describe her as JSON."}]

NAME = {"type": "string", "maxLength": 16}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "home": {
                "type": "object",
                "properties": {"city": NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["city", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "home"],
        "additionalProperties": False,
    },
    "enums and arrays": {
        "type": "object",
        "properties": {
            "mood": {"enum": ["happy", "sad", 3, None, True]},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 4},
        },
        "required": ["mood", "tags"],
        "additionalProperties": False,
    },
    "references": {
        "$defs": {
            "size": {"type": "object", "properties": {"n": {"$ref": "#/$defs/number"}}, "required": ["n"]}
            | {"additionalProperties": False},
            "number": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/size"},
        "maxItems": 2,
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20, "multipleOf": 0.5},
        "minItems": 2,
        "maxItems": 3,
    },
    "union": {
        "anyOf": [
            {"type": "boolean"},
            {"type": "string", "format": "date"},
            {
                "type": "array",
                "prefixItems": [{"const": "x"}, {"type": "integer", "maximum": 99}],
                "items": False,
            },
        ]
    },
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": NAME, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize(("name", "temperature"), [*((name, 0) for name in SCHEMAS), ("nested", 1)])
def test_json_follows_its_schema(client: openai.OpenAI, name: str, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ALICE,  # type: ignore[arg-type]
        response_format=form(SCHEMAS[name]),  # type: ignore[arg-type]
        temperature=temperature,
        seed=2,
        max_tokens=200,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop", choice.message.content
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])


def test_parsed_into_a_model_of_the_clients(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")
        name: str
        age: int

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=ALICE,  # type: ignore[arg-type]
        response_format=Person,
        temperature=0,
        max_tokens=80,
    )
    assert answer.choices[0].message.parsed == Person(name="Alice", age=31)


def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say hello."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("asks", "pattern"),
    [
        ({"guided_regex": r"(\+\d{1,3} )?\d{3}-\d{4}"}, r"(\+\d{1,3} )?\d{3}-\d{4}"),
        ({"guided_choice": ["positive", "negative"]}, "positive|negative"),
        (
            {
                "structured_outputs": {
                    "grammar": 'start: "SELECT " col ("," col)~0..2 " FROM t"\ncol: /[a-c]{1,4}/'
                }
            },
            "SELECT [a-c]{1,4}(,[a-c]{1,4}){0,2} FROM t",
        ),
        ({"guided_grammar": 'root ::= "f(" n ")"\nn ::= [0-9] | [0-9] "," n'}, r"f\([0-9](,[0-9])*\)"),
    ],
)
def test_other_grammars(client: openai.OpenAI, asks: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="I love it! My number is", extra_body=asks, seed=1, max_tokens=60
    )
    [choice] = answer.choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop"


@pytest.mark.anyio
async def test_16_at_once_with_others_answer_as_each_alone(server: RunningServer) -> None:
    kinds: list[dict[str, Any]] = [
        {"guided_json": SCHEMAS["nested"]},
        {"guided_regex": "[a-z]{3,9}( [a-z]{3,9}){2,5}"},
        {},
        {"guided_json": SCHEMAS["enums and arrays"]},
    ]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            answer = await client.completions.create(
                model=MODEL,
                prompt=f"Alice is {number} years old.",
                max_tokens=40 if number % 4 == 2 else 150,
                seed=number,
                extra_body=kinds[number % 4],
            )
            return answer.choices[0].text

        together = await asyncio.gather(*map(ask, range(16)))
        for number in (0, 5, 10, 15):
            assert await ask(number) == together[number]
    for number in range(0, 16, 4):
        jsonschema.validate(json.loads(together[number]), SCHEMAS["nested"])
        assert re.fullmatch("[a-z]{3,9}( [a-z]{3,9}){2,5}", together[number + 1])
        jsonschema.validate(json.loads(together[number + 3]), SCHEMAS["enums and arrays"])
    server.wait_idle()


def hostile() -> list[tuple[dict[str, Any], bool]]:
    """What to ask for, and whether it has to be refused (otherwise it may run)."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    endless = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    return [
        ({"guided_json": deep}, True),
        ({"guided_json": endless}, True),
        ({"guided_json": {"enum": ["x" * 200_000]}}, True),
        ({"guided_json": {"type": "object", "properties": {f"k{i}": {} for i in range(3000)}}}, False),
        ({"guided_regex": "((a{0,100}){0,100}){0,100}b"}, False),
        ({"guided_regex": "(a|b)*a(a|b){25}c"}, False),
        ({"guided_regex": "(" * 10_000}, True),
        ({"guided_grammar": "start: a\na: b\nb: a"}, True),
    ]


@pytest.mark.parametrize(("asks", "refused"), hostile())
def test_hostile_grammars_cost_a_bounded_time(
    server: RunningServer, asks: dict[str, Any], refused: bool
) -> None:
    body = {"messages": ALICE, "max_tokens": 8} | asks
    answer = http.post(f"{server.url}/v1/chat/completions", json=body)  # within a minute
    assert answer.status_code == 400 if refused else answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] in asks or not refused
        assert len(error["message"]) < 500
    server.wait_idle()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_call_and_what_becomes_of_its_answer(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": WEATHER,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, TOOL["function"]["parameters"])
    assert arguments["city"] == "Paris"

    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    [same] = streamed.message.tool_calls or []
    assert (same.function.name, same.function.arguments) == ("get_weather", call.function.arguments)

    history = [
        *WEATHER,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees and sunny"},
    ]
    answer = client.chat.completions.create(
        **asked | {"messages": history, "tool_choice": "none", "max_tokens": 30}
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_a_model_that_may_call_tools_may_also_talk(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=WEATHER,
        tools=[TOOL],
        temperature=0,
        max_tokens=40,  # type: ignore[arg-type, list-item]
    )
    [choice] = answer.choices
    assert choice.message.content or choice.message.tool_calls


def test_offline(smollm2_path: object) -> None:
    with LLM(MODEL, threads=1, max_model_len=512, kv_cache_memory_bytes=64 * 2**20) as llm:
        schema = SCHEMAS["nested"]
        wanted = [
            SamplingParams(max_tokens=150, structured_outputs=StructuredOutputs(json=schema), seed=1),
            SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
        ]
        first, second = llm.generate(["A person:", "Is the sky blue?"], wanted, use_tqdm=False)
        jsonschema.validate(json.loads(first.outputs[0].text), schema)
        assert second.outputs[0].text in ("yes", "no")
