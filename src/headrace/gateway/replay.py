"""A kept answer in the form that is asked for: whole, or as a stream's events.

An answer is kept as it came. What it is turned into says the same: a stream's pieces put together, or a whole
answer as one piece for each choice, with the finish reason and the usage that the upstream told.
"""

from __future__ import annotations

from typing import Any

import orjson

from headrace.gateway.sse import DONE

_EVENT = b"data: "
_GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"})


def is_stream(record: bytes) -> bool:
    """Whether a kept answer came as a stream."""
    return record.startswith(_EVENT)


def whole(record: bytes) -> dict[str, Any]:
    """A kept answer as one object. Raises ValueError if it cannot be put together."""
    if not is_stream(record):
        answer = orjson.loads(record)
        if not isinstance(answer, dict):
            raise ValueError("an answer is a JSON object")
        return answer
    try:
        return _joined([orjson.loads(block[len(_EVENT) :]) for block in record.split(b"\n\n")[:-2]])
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the stream's pieces do not fit together: {error!r}") from None


def events(answer: dict[str, Any]) -> bytes:
    """A whole answer as a stream with usage, [DONE] included. Raises ValueError for what is no answer."""
    try:
        return _apart(answer)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the answer cannot be made a stream: {error!r}") from None


def text_of(answer: dict[str, Any]) -> str | None:
    """The text of an answer of one choice that ended well and calls no tool; None for any other."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not ended_well(answer):
        return None
    message = choices[0].get("message") or {}
    text = message.get("content") if "message" in choices[0] else choices[0].get("text")
    if message.get("tool_calls") or message.get("function_call"):
        return None
    return text if isinstance(text, str) and text else None


def ended_well(answer: dict[str, Any]) -> bool:
    """Whether every choice ended of itself or at the length that was asked for: no abort, no filter."""
    choices = answer.get("choices")
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and choice.get("finish_reason") in _GOOD_ENDS for choice in choices
    )


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        answer |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        for piece in chunk["choices"]:
            _join_choice(choices.setdefault(piece.get("index", 0), {"index": piece.get("index", 0)}), piece)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    answer["object"] = "chat.completion" if "message" in answer["choices"][0] else "text_completion"
    return answer


def _join_choice(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        if name == "delta":
            _join_message(choice.setdefault("message", {"role": "assistant", "content": None}), value)
        elif name == "text":
            choice["text"] = choice.get("text", "") + value
        elif name == "logprobs" and isinstance(value, dict):
            kept = choice.get("logprobs") or {}
            for part, items in value.items():
                kept[part] = kept[part] + items if isinstance(kept.get(part), list) and items else items
            choice["logprobs"] = kept
        elif value is not None or name not in choice:
            choice[name] = value


def _join_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for piece in value or ():
                while len(calls) <= piece["index"]:
                    calls.append({})
                _join_call(calls[piece["index"]], piece)
        elif name != "role" and isinstance(value, str) and isinstance(message.get(name), str):
            message[name] += value
        elif value is not None or name not in message:
            message[name] = value


def _join_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        if name == "function":
            function = call.setdefault("function", {"name": "", "arguments": ""})
            function["name"] += value.get("name") or ""
            function["arguments"] += value.get("arguments") or ""
        elif name != "index" and value is not None:
            call[name] = value


def _apart(answer: dict[str, Any]) -> bytes:
    frame = {name: value for name, value in answer.items() if name not in ("choices", "usage")}
    frame["object"] = "chat.completion.chunk" if "message" in answer["choices"][0] else "text_completion"
    pieces: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        begin, end = dict(choice), {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        begin["finish_reason"] = None
        if "message" in choice:
            delta = dict(begin.pop("message"))
            if delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
            begin["delta"], end["delta"] = delta, {}
        else:
            end["text"] = ""
        pieces += [{**frame, "choices": [begin]}, {**frame, "choices": [end]}]
    if answer.get("usage") is not None:
        pieces.append({**frame, "choices": [], "usage": answer["usage"]})
    return b"".join(_EVENT + orjson.dumps(piece) + b"\n\n" for piece in pieces) + DONE
