"""Tools for models whose chat template knows none: told in words, in the hermes format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = "You can call these functions. Each is described by one JSON object:"
_TAIL = (
    "To call a function, answer with its name and its arguments as JSON between tags, like this:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"some argument": "its value"}}\n</tool_call>'
)


def tools_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``messages`` with ``tools``, in OpenAI's shape, described in the system message."""
    told = [dict(message) for message in messages]
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    words = "\n".join([_HEAD, *lines, _TAIL])
    if told and told[0].get("role") == "system":
        told[0]["content"] = f"{told[0].get('content') or ''}\n\n{words}".lstrip()
    else:
        told.insert(0, {"role": "system", "content": words})
    return told


def calls_in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` with its tool calls as text; a tool's answer becomes the user's."""
    plain = dict(message)
    if plain.get("role") == "tool":
        text = plain.get("content") or ""
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    calls = plain.pop("tool_calls", None)
    if calls:
        parts = [plain.get("content") or ""]
        for call in calls:
            function = call["function"]
            written = {"name": function.get("name"), "arguments": function.get("arguments", {})}
            parts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
        plain["content"] = "\n".join(part for part in parts if part)
    return plain
