"""What goes into the engine and what comes out: serialisable, token ids only.

These structs cross the process boundary as msgpack (msgspec), so they hold plain data.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from headrace.errors import HeadraceError, InvalidRequestError


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the output has to look like: exactly one of four; names as in vLLM.

    ``json``: a JSON schema, as an object (or True: any value) or as text. ``regex``: an expression that the
    whole output matches (Rust's syntax, without look-around and back-references). ``choice``: the possible
    outputs. ``grammar``: a Lark grammar with a rule ``start``, or GBNF with a rule ``root``.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Write a schema out, so that any depth and any number crosses to another process."""
        if self.json is not None and not isinstance(self.json, str):
            try:
                self.json = json.dumps(self.json)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"The JSON schema can't be written as JSON: {error}.", param="structured_outputs"
                ) from None

    def source(self) -> tuple[str, str]:
        """Kind (json, regex, choice or grammar) and text: equal for equal grammars.

        Raises InvalidRequestError unless exactly one is given, and of the right type.
        """
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "Exactly one of json, regex, choice and grammar says what the output looks like, not "
                f"{' and '.join(given) or 'none'}.",
                param="structured_outputs",
            )
        [kind] = given
        value: Any = getattr(self, kind)
        if kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(c, str) and c for c in value):
                raise InvalidRequestError(
                    "choice must be a list of one or more non-empty strings.", param="structured_outputs"
                )
            value = json.dumps(value, ensure_ascii=False)
        elif not isinstance(value, str):
            raise InvalidRequestError(f"{kind} must be a string.", param="structured_outputs")
        return kind, value


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when generation ends; names and defaults as in vLLM.

    ``stop`` and the fields from ``bad_words`` on concern text: the frontend sees to them, the engine ignores
    them.
    Call :meth:`validate` before use: it raises InvalidRequestError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None = up to the context's end
    min_tokens: int = 0
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; 0 = the sampled token's only; k = the top k's too
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens from the second on
    allowed_token_ids: list[int] | None = None  # nothing else is sampled
    bad_words: list[str] = msgspec.field(default_factory=list)  # the output never spells one of these
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # read by the frontend: control tokens are no part of the text
    detokenize: bool = True  # False = token ids only
    truncate_prompt_tokens: int | None = None  # keep the prompt's last k tokens; -1 = as many as fit
    structured_outputs: StructuredOutputs | None = None
    timeout_s: float | None = None  # from arrival to the last token, or the request fails; ours, not vLLM's

    def __post_init__(self) -> None:
        """As in vLLM, ``stop`` may be given as one string, and None stands for nothing."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, nothing in (("stop", []), ("stop_token_ids", []), ("logit_bias", {})):
            if getattr(self, name) is None:
                setattr(self, name, nothing)

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequestError, naming the field, what is wrong with it and what would be right.

        Without ``vocab_size`` token ids are not compared with the vocabulary.
        """
        from headrace.engine.validate import check_sampling_params  # it knows this class

        check_sampling_params(self, vocab_size)


class Sender(msgspec.Struct, kw_only=True, frozen=True):
    """For whom a request runs beside others'; see the fields of :class:`EngineRequest`."""

    priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0
    cache_salt: str = ""


NOBODY = Sender()
"""The sender of a request that nobody sets apart from others."""


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True, tag="request"):
    """One client's request, tokenised. ``params.n`` sequences come of it.

    ``kind``: what is wanted; decoders generate, encoders embed. Of the parameters an embedding uses none.
    ``output_token_ids``: of a request that goes on, what each choice has said already; None: it has ended.
    ``restarted``: an engine before this one had it; no bound of the waiting line turns it away. ``note``:
    opaque; a journal keeps requests that have one, with it. ``gather``: who asked is in no hurry; tokens
    behind a sequence's first may be told so many at a time.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = msgspec.field(default_factory=list)  # end generation unless ignore_eos
    priority: int = 0  # lower runs first; FIFO among equals; waiting makes more urgent
    tenant: str = ""  # opaque; those that have requests waiting get equal shares of the engine
    tenant_weight: float = 1.0  # of the tenant's share, from this request on
    arrival_time: float = 0.0  # time.monotonic() of the submitting process's host
    cache_salt: str = ""
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)  # no output spells one of these
    kind: Literal["generate", "embed"] = "generate"
    output_token_ids: list[list[int] | None] = msgspec.field(default_factory=list)
    restarted: bool = False
    note: bytes = b""
    gather: int = 1

    @property
    def open_choices(self) -> list[int]:
        """The choices that tokens are wanted for: all, unless some ended before the request went on."""
        said = self.output_token_ids
        return [choice for choice in range(self.params.n) if not said or said[choice] is not None]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one output position: the sampled token's, and the top k's in descending order."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one sequence (``choice`` of ``n``) after a step, or after several (``EngineRequest.gather``).

    ``finish_reason``: None while running; ``stop`` (EOS or stop token, which is the last of token_ids, or
    a grammar that is complete), ``length``, ``abort`` or ``error`` (then ``error_*`` say why). Times are
    time.monotonic() seconds.
    An embedding is one output: ``stop``, with ``vector``, at what stands as its first token's time.
    """

    request_id: str
    choice: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)  # new ones
    logprobs: list[TokenLogprobs] | None = None  # one per new token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token: of the prompt's, all but first
    finish_reason: str | None = None
    stop_token_id: int | None = None  # the token that ended it, when finish_reason is "stop" by a token
    error_message: str | None = None
    error_kind: str | None = None  # class name in headrace.errors
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache or the second tier
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    vector: bytes | None = None  # float32, little-endian


def refusal(request: EngineRequest, error: HeadraceError) -> list[EngineOutput]:
    """The end of every sequence of a request that never reached the engine."""
    return [
        EngineOutput(
            request_id=request.request_id,
            choice=choice,
            finish_reason="error",
            error_kind=type(error).__name__,
            error_message=error.message,
        )
        for choice in request.open_choices
    ]


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine, counters since start. ``kv_cache_usage`` is a share of 0..1."""

    num_running_seqs: int = 0
    num_waiting_seqs: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or cached without a user: can be taken at once
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0  # prompt tokens computed or found, of scheduled requests
    generation_tokens: int = 0
    num_preemptions: int = 0
    preemptions_swapped: int = 0  # came back with blocks of the second tier
    preemptions_recomputed: int = 0  # came back without blocks that they had had, of either tier
    num_tier_blocks: int = 0  # that the second tier has room for
    num_tier_blocks_used: int = 0
    tier_hits: int = 0  # blocks that came back from it
    tier_spills: int = 0  # blocks written to it
    tier_failures: int = 0  # blocks that could not be read, or were damaged
    tier_read_bytes: int = 0
    tier_written_bytes: int = 0
    deadlines_missed: int = 0  # requests that ended because their timeout_s had passed
    deadlines_refused: int = 0  # requests that ended early because it could not be kept
    num_tenants: int = 0  # that have a sequence waiting or running
    step_token_budget: int = 0  # tokens that the last step could have had
    draft_seconds: float = 0.0  # spent on making drafts, total; step_seconds has them, too
    draft_tokens: int = 0  # verified in steps
    draft_tokens_accepted: int = 0
    draft_tokens_per_position: list[int] = msgspec.field(default_factory=list)
    draft_tokens_accepted_per_position: list[int] = msgspec.field(default_factory=list)
    num_steps: int = 0
    step_seconds: float = 0.0  # spent in steps, total
    batch_tokens: int = 0  # tokens in steps, total

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were found; 0 before the first look-up."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted; 0 before the first draft."""
        return self.draft_tokens_accepted / self.draft_tokens if self.draft_tokens else 0.0
