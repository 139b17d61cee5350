"""Tools in a chat: what clients send, and how an answer's calls are told to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequestError
from headrace.frontend.tools import CallDelta, ToolFormat, ToolParser, arguments_schema, calls_grammar
from headrace.server.responses import CalledFunction, FunctionDelta, ToolCall, ToolCallDelta
from headrace.server.structured import with_field

if TYPE_CHECKING:
    from headrace.engine.request import SamplingParams
    from headrace.frontend.frontend import Frontend
    from headrace.frontend.tokenizer import Tokenizer

MAX_TOOLS = 128


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is a JSON schema of type object."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One tool: a function."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The one tool that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat request says about tools. ``forced``: those of which the answer is a call; or empty."""

    form: ToolFormat
    tools: list[dict[str, Any]]
    forced: list[dict[str, Any]]
    parallel: bool

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Set what these tools ask of sampling: a grammar if calls are a must, and the marks kept as text."""
        if self.form.marker and tokenizer.token_id(self.form.marker) in tokenizer.special_token_ids:
            params.skip_special_tokens = False
        if not self.forced:
            return
        if params.structured_outputs is not None:
            raise InvalidRequestError(
                "`tool_choice` makes the answer a tool call: send no other format for it", param="tool_choice"
            )
        params.structured_outputs = calls_grammar(self.form, self.forced, tokenizer, parallel=self.parallel)

    def compile(self, frontend: Frontend, params: SamplingParams) -> None:
        """Have the grammar of forced calls ready; blocks. Raises InvalidRequestError that names the tool."""
        if not self.forced or params.structured_outputs is None:
            return
        try:
            frontend.compile(params.structured_outputs)
        except InvalidRequestError:
            for tool in self.forced:
                alone = arguments_schema(tool["function"])
                with_field(
                    "tools",
                    partial(frontend.compile, alone),
                    where=f"parameters of {tool['function']['name']!r}: ",
                )
            raise

    def parser(self, seed: str) -> ToolParser:
        """A parser for one choice; ``seed`` is of the ids of its calls."""
        names = frozenset(tool["function"]["name"] for tool in self.tools)
        return ToolParser(self.form, names, parallel=self.parallel, seed=seed)


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, form: ToolFormat
) -> ToolUse | None:
    """What a request's three fields come to; None if no tool can be called.

    Raises InvalidRequestError if they contradict each other.
    """
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"`tools`: {len(tools)} tools given, at most {MAX_TOOLS} are possible", param="tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"`tools`: two functions are called {twice!r}", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(
                "`tool_choice` needs `tools`; send both or neither", param="tool_choice"
            )
        return None
    if choice == "none":
        return None
    plain: list[dict[str, Any]] = [msgspec.to_builtins(tool) for tool in tools]
    one = isinstance(choice, NamedTool)
    forced = plain if choice == "required" else []
    if isinstance(choice, NamedTool):
        forced = [tool for tool in plain if tool["function"]["name"] == choice.function.name]
        if not forced:
            known = ", ".join(repr(name) for name in names[:8])
            raise InvalidRequestError(
                f"`tool_choice`: there is no function {choice.function.name[:128]!r} in `tools`; "
                f"there is {known}",
                param="tool_choice",
            )
    return ToolUse(form, plain, forced, parallel is not False and not one)


def whole_calls(deltas: list[CallDelta]) -> list[ToolCall]:
    """A choice's calls, from all its deltas."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append(ToolCall(delta.id or "", CalledFunction(delta.name, "")))
        calls[delta.index].function.arguments += delta.arguments
    return calls


def call_deltas(deltas: list[CallDelta]) -> list[ToolCallDelta]:
    """A choice's news of calls, as a chunk tells them."""
    out = []
    for delta in deltas:
        told = ToolCallDelta(delta.index, FunctionDelta(delta.arguments))
        if delta.name is not None:
            told.id, told.type, told.function.name = delta.id or "", "function", delta.name
        out.append(told)
    return out
