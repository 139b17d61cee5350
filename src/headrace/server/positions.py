"""Positions: how far into an answer a stream is, as the ids of its events say it."""

from __future__ import annotations

from headrace.errors import InvalidRequestError
from headrace.frontend.outputs import TextOutput

OVER = "over"
"""The id of the event behind all choices, which tells the usage."""


class Positions:
    """For each choice its tokens so far, and one more once it has finished: ``12,7`` for two choices.

    The text that tokens make depends on nothing else, so that whoever names them has all that came with them.
    """

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    @classmethod
    def parse(cls, text: str, choices: int) -> Positions | None:
        """Out of a ``Last-Event-ID`` header; None for :data:`OVER`. Raises InvalidRequestError."""
        if text == OVER:
            return None
        parts = text.split(",")
        if len(parts) != choices or not all(part.isascii() and part.isdigit() for part in parts):
            raise _wrong(text, choices)
        if max(map(len, parts)) > 9:
            raise _wrong(text, choices)
        return cls([int(part) for part in parts])

    def advance(self, output: TextOutput) -> int:
        """``output`` follows; its choice's new position."""
        self.counts[output.choice] += len(output.token_ids) + (output.finish_reason is not None)
        return self.counts[output.choice]

    def __str__(self) -> str:
        return ",".join(map(str, self.counts))


def _wrong(text: str, choices: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"`Last-Event-ID` must be the id of an event of this answer: {choices} numbers with commas between, "
        f"or {OVER!r}, not {text[:40]!r}; leave it out to get the answer from its beginning"
    )
