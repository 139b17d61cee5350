"""``/v1/chat/completions``: answers in OpenAI's shapes, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.engine.request import TokenLogprobs
from headrace.frontend.outputs import TextOutput
from headrace.frontend.tools import CallDelta, ToolParser
from headrace.server.generation import Outputs
from headrace.server.logprobs import TokenBytes, chat_logprobs, prompt_logprobs
from headrace.server.positions import OVER, Positions
from headrace.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    encode,
    event,
)
from headrace.server.tools import ToolUse, call_deltas, whole_calls


@dataclass(slots=True)
class ChatAnswer:
    """Turns the outputs of one generation into a :class:`ChatCompletion` or into its chunks."""

    id: str
    model: str
    fingerprint: str
    tokenizer: TokenBytes
    n: int
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: ToolUse | None = None
    resumable: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    positions: Positions | None = None
    begun: bool = False
    over: bool = False
    _parsers: dict[int, ToolParser] = field(default_factory=dict)
    _untold: list[int] = field(default_factory=list)  # tokens of a resumable answer, since its last chunk

    async def whole(self, generation: Outputs) -> bytes:
        """The body of the answer, once every choice has finished."""
        texts: list[list[str]] = [[] for _ in range(self.n)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(self.n)]
        ends: dict[int, TextOutput] = {}
        scored: list[TokenLogprobs] | None = None
        async for outputs in generation:
            for output in outputs:
                texts[output.choice].append(output.text)
                logprobs[output.choice].extend(output.logprobs or ())
                scored = output.prompt_logprobs or scored
                if output.finish_reason is not None:
                    ends[output.choice] = output
        choices = []
        for index, end in sorted(ends.items()):
            content, calls = self._parsed(index, "".join(texts[index]), ending=True)
            message = AssistantMessage("assistant", content)
            if calls:
                message.content = content or None
                message.tool_calls = whole_calls(calls)
            choices.append(
                ChatChoice(
                    index,
                    message,
                    chat_logprobs(self.tokenizer, logprobs[index]) if self.wants_logprobs else None,
                    self._finish_reason(end),
                    end.stop_reason,
                )
            )
        answer = ChatCompletion(
            self.id, self.created, self.model, self.fingerprint, choices, generation.settle()
        )
        if self.wants_prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self.tokenizer, scored or [])
        return encode(answer)

    async def events(self, generation: Outputs) -> AsyncIterator[bytes]:
        """The chunks as server-sent events, those of one step together.

        With ``positions`` each has an id. What was told before (:meth:`skip`, ``begun``, ``over``) is not
        told again.
        """
        chunk = ChatCompletionChunk(self.id, self.created, self.model, self.fingerprint, [])
        if self.include_usage:
            chunk.usage = None
        events = bytearray()
        for index in range(0 if self.begun else self.n):
            chunk.choices = [ChatChunkChoice(index, Delta(role="assistant", content=""))]
            # without an id but for the last one: whoever has it has them all
            events += event(chunk, self.positions if index == self.n - 1 else None)
        async for outputs in generation:
            for output in outputs:
                if (choice := self._choice(output)) is not None:
                    chunk.choices = [choice]
                    if self.continuous_usage:
                        chunk.usage = generation.settle()
                    events += event(chunk, self.positions)
            if events:
                yield bytes(events)
                events.clear()
        if self.include_usage and not self.over:
            chunk.choices = []
            chunk.usage = generation.settle()
            yield event(chunk, None if self.positions is None else OVER)

    def skip(self, told: TextOutput) -> None:
        """Take note of what the client has been told already: it is not told again."""
        self.begun = True
        self._choice(told)
        self._untold.clear()

    def _choice(self, output: TextOutput) -> ChatChunkChoice | None:
        """None when there is nothing to tell: text that is held back has no chunk."""
        if self.positions is not None:
            self.positions.advance(output)
        choice = ChatChunkChoice(output.choice, Delta())
        if self.resumable:
            self._untold += output.token_ids
        content, calls = self._parsed(output.choice, output.text, ending=output.finish_reason is not None)
        if content:
            choice.delta.content = content
        if calls:
            choice.delta.tool_calls = call_deltas(calls)
        if self.wants_logprobs and output.logprobs:
            choice.logprobs = chat_logprobs(self.tokenizer, output.logprobs)
        if output.finish_reason is not None:
            choice.finish_reason = self._finish_reason(output)
            choice.stop_reason = output.stop_reason
        elif not content and not calls and choice.logprobs is None:
            return None
        if self.resumable:
            choice.token_ids, self._untold = self._untold, []
        return choice

    def _parsed(self, choice: int, text: str, *, ending: bool) -> tuple[str, list[CallDelta]]:
        """What a choice's text says beside its tool calls, and what is new of those."""
        if self.tools is None:
            return text, []
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self.tools.parser(f"{self.id} {choice}")
        parsed = parser.push(text)
        if not ending:
            return parsed.content, parsed.calls
        last = parser.finish()
        return parsed.content + last.content, parsed.calls + last.calls

    def _finish_reason(self, output: TextOutput) -> str:
        """As the engine has it, but ``tool_calls`` for an answer that ends with its calls."""
        parser = self._parsers.get(output.choice)
        if output.finish_reason == "stop" and parser is not None and parser.num_calls:
            return "tool_calls"
        return output.finish_reason or "stop"
