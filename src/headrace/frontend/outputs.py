"""What the frontend hands to LLM and to the server: text."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.request import TokenLogprobs


@dataclass(slots=True)
class TextOutput:
    """News of one choice: what was added since the last one (a delta), possibly empty text.

    ``token_ids`` and ``text`` advance together but not in step: text may be held back until it is known not
    to be the beginning of a stop string, or until its last byte is there. Times are time.monotonic() seconds.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # once, when asked for: of all prompt tokens but the first
    )
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: str | int | None = None  # the stop string or stop token id that matched; None for EOS
    num_cached_tokens: int = 0
    error_message: str | None = None
    error_kind: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position. ``rank``: 1 is the likeliest; None if not among the top ones."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` answers, complete.

    ``logprobs``: per token, candidates by id: the sampled one and the top ones asked for.
    ``cumulative_logprob``: the sampled tokens' sum, when log-probabilities were asked for.
    ``stop_reason``: the stop string or token id that matched; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector, as numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many dimensions it has."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """One text and its embedding. ``prompt`` is None if it was given as token ids."""

    request_id: str
    outputs: EmbeddingOutput
    prompt: str | None
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its answers. ``prompt`` is None if it was given as token ids.

    ``prompt_logprobs``: per prompt token, candidates by id, when asked for; None for the first, which
    follows nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
