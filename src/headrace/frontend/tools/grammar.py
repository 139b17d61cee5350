"""A grammar of calls: what an output that must call tools may look like, in a format's own shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.grammar import WHITESPACE
from headrace.engine.request import StructuredOutputs
from headrace.errors import InvalidRequestError
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.tools.formats import ToolFormat

MAX_CALLS = 16
"""In one answer that must call tools: a small model left free would never stop."""

_OPEN = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "additionalProperties")


def calls_grammar(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool = True
) -> StructuredOutputs:
    """One or more calls (one, without ``parallel``) of ``tools``, in OpenAI's shape, and nothing else.

    Arguments follow each tool's ``parameters``. Raises InvalidRequestError if those can't be written down;
    a schema that can't be compiled is found when the grammar is.
    """
    rules = [
        f"call{index}: {_text(_opening(form, tool))} arguments{index} {_text('}')}\n"
        f"arguments{index}: %json {arguments_schema(tool['function']).json}"
        for index, tool in enumerate(tools)
    ]
    call = " | ".join(f"call{index}" for index in range(len(tools)))
    more = MAX_CALLS - 1 if parallel else 0
    begin = _mark(form.begin, tokenizer) + _literal(form.opening)
    end = _literal(form.closing) + _mark(form.end, tokenizer)
    if form.one_block:
        start = (
            f"{begin}call ({_text(form.separator)} call){{0,{more}}}{end}" if more else f"{begin}call{end}"
        )
        block = ""
    else:
        start = f"block ({_text(form.separator)} block){{0,{more}}}" if more else "block"
        block = f"block: {begin}call{end}\n"
    return StructuredOutputs(grammar=f"start: {start}\n{block}call: {call}\n" + "\n".join(rules) + "\n")


def _opening(form: ToolFormat, tool: Mapping[str, Any]) -> str:
    name = json.dumps(tool["function"]["name"], ensure_ascii=False)
    return f'{{"name": {name}, "{form.arguments_key}": '


def arguments_schema(function: Mapping[str, Any]) -> StructuredOutputs:
    """A function's arguments: an object, and of nothing but what its ``parameters`` name.

    Raises InvalidRequestError if those are no schema of an object, or can't be written down.
    """
    schema = dict(function.get("parameters") or {})
    if schema.get("type") not in (None, "object"):
        raise InvalidRequestError(
            f"The parameters of {function['name']!r} must be a JSON schema of type object.", param="tools"
        )
    schema["type"] = "object"
    # Left open, as JSON schema has it, a model may make up arguments that no function takes.
    if not any(key in schema for key in _OPEN):
        schema["additionalProperties"] = False
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return StructuredOutputs(json=schema)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return f" {_text(text)} " if text else ""


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark that is a control token has to be written as such: it matches no text."""
    token = tokenizer.token_id(text) if text else None
    return f"<[{token}]> " if token in tokenizer.special_token_ids else _literal(text)
