"""What is known of one request, whatever became of it."""

from __future__ import annotations

from typing import Literal

import msgspec

TokenSource = Literal["usage", "tokenizer", "chunks"]

INTERRUPTED = "interrupted"
"""Error of a request that the user's Ctrl-C cut off: it says nothing about the server."""
ABANDONED = "abandoned"
"""Error of a request that was given up because the server fell further and further behind: a failure."""


class Record(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the stage began; ``chunk_s`` those of chunks with content.

    ``scheduled_s`` is when the load asked for it: in an open loop the arrival's time, in a closed loop the
    time of sending. ``index`` is the request's number in the workload; it is negative while warming up.
    ``error`` is the kind of failure, ``detail`` what the server or the network said.
    """

    index: int
    turn: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = msgspec.field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: TokenSource = "usage"
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def warmup(self) -> bool:
        """Sent before the measurement began."""
        return self.index < 0

    @property
    def ok(self) -> bool:
        """Answered to the end."""
        return self.error is None

    @property
    def counts(self) -> bool:
        """Part of the measurement: neither warm-up nor cut off by the user."""
        return self.index >= 0 and self.error != INTERRUPTED

    @property
    def ttft_s(self) -> float | None:
        """Scheduled to first content; None where nothing was streamed."""
        return self.chunk_s[0] - self.scheduled_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """Scheduled to end."""
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E − TTFT) / (tokens − 1); None with fewer than two tokens or without a stream."""
        ttft = self.ttft_s
        if ttft is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - ttft) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks with content."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]
