"""Chat templates: jinja source that came with a model, run as untrusted code.

The environment offers what transformers offers to templates: ``raise_exception``, ``strftime_now``,
``tojson`` that keeps Unicode, loop controls, ``{% generation %}`` blocks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from headrace.errors import InvalidRequestError, ModelFormatError
from headrace.frontend.template_sandbox import TemplateSandbox
from headrace.frontend.tools.prompt import calls_in_words, tools_in_words


class ChatTemplate:
    """A compiled template. Thread-safe.

    Raises ModelFormatError if the source is no valid jinja.
    """

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        environment = TemplateSandbox()
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            bos_token=bos_token or "",
            eos_token=eos_token or "",
        )
        self._environment = environment
        self._knows_tools = re.search(r"\btools\b", source) is not None
        self._knows_calls = "tool_calls" in source
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFormatError(f"The model's chat template is not valid jinja: {error}") from None

    def render(
        self,
        /,  # so that a variable may be called self
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        ``continue_final_message``: it ends with the text of the last message, an assistant's, left open.

        ``messages``: ``role`` and ``content`` (a string or a list of text parts, joined by line feeds), and
        whatever else the template reads. Where the template knows no tools, they are told in words. Raises
        InvalidRequestError if messages are malformed, or with the template's own words if it refuses them,
        fails, or takes too long.
        """
        checked = checked_messages(messages)
        if not self._knows_calls:
            checked = [calls_in_words(message) for message in checked]
        if tools and not self._knows_tools:
            checked = tools_in_words(checked, tools)
        mark = ""
        if continue_final_message:
            # whatever the template writes or trims behind the text stands behind the mark
            mark = os.urandom(16).hex()
            checked = _marked(checked, mark)
            add_generation_prompt = False
        variables |= {
            "messages": checked,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._environment.render_within_budget(self._template, variables)
        except _RefusedError as error:
            raise InvalidRequestError(str(error), param="messages") from None
        except Exception as error:  # whatever a template can provoke is the template's
            why = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"The model's chat template does not work with these messages: {why}", param="messages"
            ) from None
        if mark and mark not in text:
            raise InvalidRequestError(
                "The model's chat template does not show the last message, so it cannot be continued.",
                param="messages",
            )
        return text[: text.rindex(mark)] if mark else text


def _marked(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """``messages`` with ``mark`` behind the text of the last one."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant's, without tool calls.",
            param="continue_final_message",
        )
    return [*messages[:-1], {**last, "content": last["content"] + mark}]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of ``messages`` in the shape that templates expect: content as text, arguments as objects.

    Raises InvalidRequestError naming the message that is wrong.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            "messages must be a list of objects with role and content.", param="messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; at least one message is needed.", param="messages")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be an object with role and content.", param=name)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"{name}.role must be a string such as 'system', 'user' or 'assistant'.", param=f"{name}.role"
        )
    checked = dict(message)
    if content is None:
        if not message.get("tool_calls"):
            raise InvalidRequestError(f"{name}.content is missing.", param=f"{name}.content")
        checked["content"] = ""
    elif not isinstance(content, str):
        checked["content"] = _joined_parts(content, f"{name}.content")
    if message.get("tool_calls"):
        checked["tool_calls"] = _checked_calls(message["tool_calls"], f"{name}.tool_calls")
    return checked


def _joined_parts(parts: Any, name: str) -> str:
    if not isinstance(parts, Sequence) or isinstance(parts, (bytes, bytearray)):
        raise InvalidRequestError(f"{name} must be a string or a list of text parts.", param=name)
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else part
        if kind not in (None, "text"):
            raise InvalidRequestError(
                f"{name}[{index}] is of type {kind!r}; this model reads only parts of type 'text'.",
                param=name,
            )
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{name}[{index}] must be an object with type 'text' and a string text.", param=name
            )
        texts.append(text)
    return "\n".join(texts)


def _checked_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """OpenAI writes a call's arguments as a string of JSON; templates write them out from an object."""
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidRequestError(f"{name} must be a list.", param=name)
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequestError(f"{name}[{index}] must be an object with a function.", param=name)
        function = dict(function)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise InvalidRequestError(
                    f"{name}[{index}].function.arguments is not valid JSON.", param=name
                ) from None
        checked.append({**call, "function": function})
    return checked


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: str) -> str:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(str(format)[:200])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 16:
        raise ValueError("tojson: indent is at most 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
