"""Anthropic's Messages API as an upstream: requests, answers, and the events of streams, put into its words.

Its API says more than OpenAI's can (thinking, citations): what clients cannot be told is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.errors import InvalidRequestError
from headrace.gateway.kinds import Kind, Translation
from headrace.gateway.usage import Usage, as_told

_VERSION = "2023-06-01"
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


@dataclass(frozen=True, slots=True)
class Anthropic(Kind):
    """The adapter. Only chats are served; see :class:`Kind` for its methods."""

    def headers(self, key: str | None) -> dict[str, str]:
        """The key has a header of its own, and there is a version."""
        return {"anthropic-version": _VERSION} | ({} if key is None else {"x-api-key": key})

    def path(self, route: str) -> str:
        """There is one route."""
        return "messages"

    def body(self, asked: dict[str, Any], model: str, route: str, *, most: int) -> bytes:
        """A chat as a message request. Raises InvalidRequestError for messages that it has no words for."""
        try:
            system, messages = _messages(asked["messages"])
            body: dict[str, Any] = {"model": model, "max_tokens": most, "messages": messages}
            if system:
                body["system"] = system
            body |= _options(asked)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidRequestError(
                "`messages` or `tools` are not as OpenAI's are: they cannot be put into Anthropic's words",
                param="messages",
            ) from None
        return orjson.dumps(body)

    def answer(self, answer: Any) -> Any:
        """A message as a chat completion; anything else is left as it is."""
        if not isinstance(answer, dict) or answer.get("type") != "message":
            return answer
        blocks = [block for block in answer.get("content") or () if isinstance(block, dict)]
        text = "".join(block.get("text", "") for block in blocks if block.get("type") == "text")
        calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer.get("stop_reason"))}
        return {
            "id": answer.get("id"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.get("model"),
            "choices": [choice],
            "usage": as_told(_usage(answer.get("usage") or {})),
        }

    def translation(self) -> Translation:
        """For one stream."""
        return _Events().chunks


ANTHROPIC = Anthropic(
    probe="models",
    serves=frozenset({"chat", "tools"}),
    lacks=frozenset({"n", "logprobs", "response_format", "logit_bias", "functions", "audio"}),
    continues="nothing",
)


# Requests


def _messages(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The system's part, and turns that alternate: neighbours of one role are one turn."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in ("system", "developer"):
            system += [block["text"] for block in _blocks(message.get("content"))]
            continue
        blocks = _turn(message)
        role = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return "\n\n".join(system), turns


def _turn(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        blocks = _blocks(message.get("content"))
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
    blocks = _blocks(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = orjson.loads(function.get("arguments") or "{}")
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Content as blocks; empty texts, which the API refuses, are none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(_parts(content or []))


def _parts(parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for part in parts:
        if part["type"] == "text":
            if part["text"]:
                yield {"type": "text", "text": part["text"]}
        elif part["type"] == "image_url":
            url = part["image_url"]["url"]
            head, comma, data = url.partition(",")
            if comma and head.startswith("data:") and head.endswith(";base64"):
                kind = head.removeprefix("data:").removesuffix(";base64")
                yield {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
            else:
                yield {"type": "image", "source": {"type": "url", "url": url}}
        else:
            raise ValueError(part["type"])


def _options(asked: dict[str, Any]) -> dict[str, Any]:
    """What a request may set, by Anthropic's names. Wishes that it does not know (seed, penalties) are left
    out.
    """
    out = {name: asked[name] for name in ("top_p", "top_k", "stream") if asked.get(name) is not None}
    if asked.get("temperature") is not None:
        out["temperature"] = min(asked["temperature"], 1.0)  # its scale ends there
    if stop := asked.get("stop"):
        out["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if isinstance(asked.get("user"), str):
        out["metadata"] = {"user_id": asked["user"]}
    if not asked.get("tools"):
        return out
    out["tools"] = [_tool(tool["function"]) for tool in asked["tools"]]
    choice = asked.get("tool_choice")
    if isinstance(choice, dict):
        wanted: dict[str, Any] = {"type": "tool", "name": choice["function"]["name"]}
    else:
        wanted = {"type": {"required": "any", "none": "none"}.get(choice or "auto", "auto")}
    if asked.get("parallel_tool_calls") is False and wanted["type"] != "none":
        wanted["disable_parallel_tool_use"] = True
    out["tool_choice"] = wanted
    return out


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    tool = {"name": function["name"], "input_schema": schema}
    return tool | ({"description": function["description"]} if function.get("description") else {})


# Answers


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _finish(reason: Any) -> str:
    return _FINISH.get(reason, "stop")


def _usage(told: dict[str, Any]) -> Usage:
    """Its ``input_tokens`` are those that no cache had or took."""

    def count(name: str) -> int:
        value = told.get(name)
        return value if type(value) is int else 0

    cached = count("cache_read_input_tokens")
    prompt = count("input_tokens") + count("cache_creation_input_tokens") + cached
    return Usage(prompt, count("output_tokens"), cached)


class _Events:
    """The events of one stream as chunks. Calls are counted by themselves, where Anthropic counts blocks."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._calls: dict[int, int] = {}  # by block
        self._silent: set[int] = set()  # calls without arguments so far, by block
        self._usage: dict[str, Any] = {}

    def chunks(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Raises KeyError and the like for what is no event of Anthropic's."""
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
            self._head = {
                "id": message["id"],
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": message["model"],
            }
            self._usage = dict(message.get("usage") or {})
            return [self._chunk({"role": "assistant", "content": ""})]
        if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block, index = event["content_block"], len(self._calls)
            self._calls[event["index"]] = index
            self._silent.add(event["index"])
            function = {"name": block["name"], "arguments": ""}
            call = {"index": index, "id": block["id"], "type": "function", "function": function}
            return [self._chunk({"tool_calls": [call]})]
        if kind == "content_block_delta":
            return self._delta(event["index"], event["delta"])
        if kind == "message_delta":
            # these counts are totals, and those that are missing stand
            self._usage |= {name: n for name, n in (event.get("usage") or {}).items() if n is not None}
            reason = event["delta"].get("stop_reason")
            return [] if reason is None else [self._chunk({}, _finish(reason))]
        if kind == "content_block_stop" and event["index"] in self._silent:
            return [self._arguments(event["index"], "{}")]
        if kind == "message_stop":
            return [{**self._head, "choices": [], "usage": as_told(_usage(self._usage))}]
        return [event] if kind == "error" else []  # pings, and what may come in later versions

    def _delta(self, index: int, delta: dict[str, Any]) -> list[dict[str, Any]]:
        if delta["type"] == "text_delta":
            return [self._chunk({"content": delta["text"]})]
        if delta["type"] == "input_json_delta" and delta["partial_json"]:
            return [self._arguments(index, delta["partial_json"])]
        return []

    def _arguments(self, block: int, text: str) -> dict[str, Any]:
        self._silent.discard(block)
        return self._chunk({"tool_calls": [{"index": self._calls[block], "function": {"arguments": text}}]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
