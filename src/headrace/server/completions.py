"""``/v1/completions``: answers in OpenAI's shapes, whole or streamed."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from headrace.engine.request import TokenLogprobs
from headrace.frontend.outputs import TextOutput
from headrace.server.answer import Answer
from headrace.server.generation import Outputs
from headrace.server.logprobs import completion_logprobs, prompt_logprobs, text_length
from headrace.server.responses import Completion, CompletionChoice, CompletionLogprobs, encode


@dataclass(slots=True, kw_only=True)
class CompletionAnswer(Answer[CompletionChoice]):
    """Turns the outputs of one generation into a :class:`Completion` or into its chunks.

    ``echo``: the texts of the prompts, to stand before their completions; empty for no echo.
    ``first_tokens``: of the prompts; with ``echo`` and log-probabilities.
    """

    prompts: int
    echo: list[str] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    _offsets: dict[int, int] = field(default_factory=dict)

    async def whole(self, generation: Outputs) -> bytes:
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

    def skip(self, told: TextOutput) -> None:
        """Take note of what the client has been told already: it is not told again, and offsets count it."""
        Answer.skip(self, told)
        if told.logprobs is None:
            before = self._offsets.get(told.choice, 0)
            self._offsets[told.choice] = before + text_length(self.tokenizer, told.token_ids)

    def _chunk(self) -> Completion:
        return Completion(self.id, self.created, self.model, self.fingerprint, [])

    def _opening(self) -> list[CompletionChoice]:
        count = self.n * self.prompts if self.echo else 0
        return [CompletionChoice(index, self._echo(index)) for index in range(count)]

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
        choice = CompletionChoice(output.choice, output.text)
        if self.wants_logprobs and output.logprobs:
            choice.logprobs, self._offsets[output.choice] = completion_logprobs(
                self.tokenizer, output.logprobs, self._offsets.get(output.choice, 0)
            )
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            choice.stop_reason = output.stop_reason
        elif not output.text and choice.logprobs is None:
            return None
        return choice
