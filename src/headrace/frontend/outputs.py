"""What the frontend hands to LLM and to the server: text."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.request import TokenLogprobs


@dataclass(slots=True)
class TextOutput:
    """News of one choice: what was added since the last one (a delta), possibly empty text."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for EOS
    num_cached_tokens: int = 0
    error_message: str | None = None
    error_kind: str | None = None
