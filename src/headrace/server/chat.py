"""``/v1/chat/completions``: answers in OpenAI's shapes, whole or streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.request import TokenLogprobs
from headrace.frontend.outputs import TextOutput
from headrace.frontend.tools import CallDelta, ToolParser
from headrace.server.answer import Answer
from headrace.server.generation import Outputs
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Delta,
    encode,
)
from headrace.server.tools import ToolUse, call_deltas, whole_calls


@dataclass(slots=True, kw_only=True)
class ChatAnswer(Answer[ChatChunkChoice]):
    """Turns the outputs of one generation into a :class:`ChatCompletion` or into its chunks."""

    tools: ToolUse | None = None
    _parsers: dict[int, ToolParser] = field(default_factory=dict)

    async def whole(self, generation: Outputs) -> bytes:
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

    def _chunk(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, self.created, self.model, self.fingerprint, [])

    def _opening(self) -> list[ChatChunkChoice]:
        return [ChatChunkChoice(index, Delta(role="assistant", content="")) for index in range(self.n)]

    def _choice(self, output: TextOutput) -> ChatChunkChoice | None:
        choice = ChatChunkChoice(output.choice, Delta())
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
