"""One answer in OpenAI's shapes: what chats and completions have in common, and the order of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headrace.frontend.outputs import TextOutput
from headrace.server.generation import Outputs
from headrace.server.logprobs import TokenBytes
from headrace.server.positions import OVER, Positions
from headrace.server.responses import ChatChunkChoice, CompletionChoice, event

Choice = TypeVar("Choice", ChatChunkChoice, CompletionChoice)


@dataclass(slots=True, kw_only=True)
class Answer(ABC, Generic[Choice]):
    """Turns the outputs of one generation into one body, or into the chunks of a stream.

    ``n``: choices of each prompt. ``positions``: how far the stream is; with them its events have ids.
    ``begun``, ``over``: its client has the beginning already, or all that choices say.
    """

    id: str
    model: str
    fingerprint: str
    tokenizer: TokenBytes
    n: int
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    resumable: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    positions: Positions | None = None
    begun: bool = False
    over: bool = False
    _untold: list[int] = field(default_factory=list)  # tokens of a resumable answer, since its last chunk

    @abstractmethod
    async def whole(self, generation: Outputs) -> bytes:
        """The body of the answer, once every choice has finished."""

    async def events(self, generation: Outputs) -> AsyncIterator[bytes]:
        """The chunks as server-sent events, those of one step together.

        With ``positions`` each has an id. What was told before (:meth:`skip`, ``begun``, ``over``) is not
        told again.
        """
        chunk = self._chunk()
        if self.include_usage:
            chunk.usage = None
        events = bytearray()
        opening = [] if self.begun else self._opening()
        for choice in opening:
            chunk.choices = [choice]
            # without an id but for the last one: whoever has it has them all
            events += event(chunk, self.positions if choice is opening[-1] else None)
        async for outputs in generation:
            for output in outputs:
                if (news := self._news(output)) is not None:
                    chunk.choices = [news]
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
        self._news(told)
        self._untold.clear()

    def _news(self, output: TextOutput) -> Choice | None:
        """What to tell of ``output``, if there is anything."""
        if self.positions is not None:
            self.positions.advance(output)
        if self.resumable:
            self._untold += output.token_ids
        choice = self._choice(output)
        if choice is not None and self.resumable:
            choice.token_ids, self._untold = self._untold, []
        return choice

    @abstractmethod
    def _chunk(self) -> Any:
        """A chunk without choices."""

    @abstractmethod
    def _opening(self) -> list[Choice]:
        """What stands before all that is generated."""

    @abstractmethod
    def _choice(self, output: TextOutput) -> Choice | None:
        """News of a choice; None when there is nothing to tell: text that is held back has no chunk."""
