"""SavedAnswer: what the server has to know of a request to write its answer, now or in another process."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.frontend.frontend import Frontend
from headrace.server.chat import ChatAnswer
from headrace.server.completions import CompletionAnswer
from headrace.server.tools import ToolUse


class SavedAnswer(msgspec.Struct, tag="answer", omit_defaults=True, kw_only=True):
    """One request's answer, as its body asked for it. ``request_name``: its ``x-request-id``.

    ``n``: choices of each of ``prompts``. For the others see :class:`ChatAnswer`, :class:`CompletionAnswer`.
    """

    kind: Literal["chat", "completion"]
    id: str
    model: str
    created: int
    request_name: str
    n: int
    prompts: int = 1
    stream: bool = False
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: ToolUse | None = None
    resumable: bool = False
    echo: list[str] = msgspec.field(default_factory=list)
    first_tokens: list[int] = msgspec.field(default_factory=list)

    def open(self, frontend: Frontend) -> ChatAnswer | CompletionAnswer:
        """The answer, nothing of which is written yet. Its lists are these."""
        fingerprint = frontend.client.capabilities.fingerprint
        if self.kind == "chat":
            return ChatAnswer(
                id=self.id,
                model=self.model,
                created=self.created,
                fingerprint=fingerprint,
                tokenizer=frontend.tokenizer,
                n=self.n,
                wants_logprobs=self.wants_logprobs,
                wants_prompt_logprobs=self.wants_prompt_logprobs,
                include_usage=self.include_usage,
                continuous_usage=self.continuous_usage,
                tools=self.tools,
                resumable=self.resumable,
            )
        return CompletionAnswer(
            id=self.id,
            model=self.model,
            created=self.created,
            fingerprint=fingerprint,
            tokenizer=frontend.tokenizer,
            n=self.n,
            prompts=self.prompts,
            wants_logprobs=self.wants_logprobs,
            wants_prompt_logprobs=self.wants_prompt_logprobs,
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            echo=self.echo,
            first_tokens=self.first_tokens,
            resumable=self.resumable,
        )

    def notes(self) -> list[bytes]:
        """A note for the engine's request of each prompt; the first one's has the answer itself."""
        rest = [msgspec.msgpack.encode(Part(self.id, number)) for number in range(1, self.prompts)]
        return [msgspec.msgpack.encode(self), *rest]


class Part(msgspec.Struct, tag="part"):
    """The note of a prompt that is not the first of its answer."""

    answer_id: str
    number: int


def read_note(note: bytes) -> SavedAnswer | Part | None:
    """What :meth:`SavedAnswer.notes` wrote; None for anything else."""
    try:
        return msgspec.msgpack.decode(note, type=SavedAnswer | Part)
    except msgspec.DecodeError:
        return None
