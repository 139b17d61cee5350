"""``/v1/completions``: answers in OpenAI's shapes, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from msgspec import UNSET

from headrace.engine.request import TokenLogprobs
from headrace.frontend.outputs import TextOutput
from headrace.server.generation import Outputs
from headrace.server.logprobs import TokenBytes, completion_logprobs, prompt_logprobs, text_length
from headrace.server.positions import OVER, Positions
from headrace.server.responses import Completion, CompletionChoice, CompletionLogprobs, encode, event


@dataclass(slots=True)
class CompletionAnswer:
    """Turns the outputs of one generation into a :class:`Completion` or into its chunks.

    ``echo``: the texts of the prompts, to stand before their completions; empty for no echo.
    ``first_tokens``: of the prompts; with ``echo`` and log-probabilities.
    """

    id: str
    model: str
    fingerprint: str
    tokenizer: TokenBytes
    n: int  # per prompt
    prompts: int
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: list[str] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    resumable: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    positions: Positions | None = None
    begun: bool = False
    over: bool = False
    _offsets: dict[int, int] = field(default_factory=dict)
    _untold: list[int] = field(default_factory=list)  # tokens of a resumable answer, since its last chunk

    async def whole(self, generation: Outputs) -> bytes:
        """The body of the answer, once every choice has finished."""
        count = self.n * self.prompts
        texts: list[list[str]] = [[self._echo(index)] for index in range(count)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        scored: list[list[TokenLogprobs]] = [[] for _ in range(self.prompts)]
        ends: dict[int, TextOutput] = {}
        async for outputs in generation:
            for output in outputs:
                texts[output.choice].append(output.text)
                logprobs[output.choice].extend(output.logprobs or ())
                scored[output.choice // self.n].extend(output.prompt_logprobs or ())
                if output.finish_reason is not None:
                    ends[output.choice] = output
        choices = [
            CompletionChoice(
                index,
                "".join(texts[index]),
                self._logprobs(scored[index // self.n], logprobs[index], index)
                if self.wants_logprobs
                else None,
                end.finish_reason,
                end.stop_reason,
                prompt_logprobs(self.tokenizer, scored[index // self.n])
                if self.wants_prompt_logprobs
                else UNSET,
            )
            for index, end in sorted(ends.items())
        ]
        answer = Completion(self.id, self.created, self.model, self.fingerprint, choices, generation.settle())
        return encode(answer)

    async def events(self, generation: Outputs) -> AsyncIterator[bytes]:
        """The chunks as server-sent events, those of one step together.

        With ``positions`` each has an id. What was told before (:meth:`skip`, ``begun``, ``over``) is not
        told again.
        """
        chunk = Completion(self.id, self.created, self.model, self.fingerprint, [])
        if self.include_usage:
            chunk.usage = None
        events = bytearray()
        if self.echo and not self.begun:
            last = self.n * self.prompts - 1
            for index in range(last + 1):
                chunk.choices = [CompletionChoice(index, self._echo(index))]
                # without an id but for the last one: whoever has it has them all
                events += event(chunk, self.positions if index == last else None)
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
        """Take note of what the client has been told already: it is not told again, and offsets count it."""
        self.begun = True
        self._choice(told)
        self._untold.clear()
        if told.logprobs is None:
            before = self._offsets.get(told.choice, 0)
            self._offsets[told.choice] = before + text_length(self.tokenizer, told.token_ids)

    def _echo(self, choice: int) -> str:
        return self.echo[choice // self.n] if self.echo else ""

    def _logprobs(
        self, scored: list[TokenLogprobs], sampled: list[TokenLogprobs], choice: int
    ) -> CompletionLogprobs:
        """Those of the answer, behind those of the prompt if that is echoed."""
        if not self.echo:
            return completion_logprobs(self.tokenizer, sampled, 0)[0]
        first = self.first_tokens[choice // self.n]
        return completion_logprobs(self.tokenizer, scored + sampled, 0, first)[0]

    def _choice(self, output: TextOutput) -> CompletionChoice | None:
        if self.positions is not None:
            self.positions.advance(output)
        choice = CompletionChoice(output.choice, output.text)
        if self.resumable:
            self._untold += output.token_ids
        if self.wants_logprobs and output.logprobs:
            choice.logprobs, self._offsets[output.choice] = completion_logprobs(
                self.tokenizer, output.logprobs, self._offsets.get(output.choice, 0)
            )
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            choice.stop_reason = output.stop_reason
        elif not output.text and choice.logprobs is None:
            return None
        if self.resumable:
            choice.token_ids, self._untold = self._untold, []
        return choice
