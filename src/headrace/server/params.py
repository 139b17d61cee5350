"""From a request's body to the engine's sampling parameters."""

from __future__ import annotations

from headrace.engine.request import SamplingParams
from headrace.frontend.beam_search import BeamSearchParams
from headrace.server.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    stop_strings,
)
from headrace.server.structured import structured_outputs


def chat_params(request: ChatCompletionRequest) -> SamplingParams:
    """As asked, with OpenAI's defaults: up to the context's end."""
    params = _common(request)
    params.max_tokens = request.max_completion_tokens or request.max_tokens
    params.logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return params


def completion_params(request: CompletionRequest) -> SamplingParams:
    """As asked, with OpenAI's defaults: 16 tokens."""
    params = _common(request)
    params.max_tokens = 16 if request.max_tokens is None else request.max_tokens
    params.logprobs = request.logprobs
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = request.logprobs
    return params


def beam_params(request: GenerationRequest, params: SamplingParams, room: int) -> BeamSearchParams | None:
    """How beams are searched, if that is asked for. ``room``: most tokens of an answer without a limit."""
    if not request.use_beam_search:
        return None
    return BeamSearchParams(
        beam_width=request.num_beams or params.n,
        max_tokens=params.max_tokens or room,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
        ignore_eos=params.ignore_eos,
    )


def _common(request: GenerationRequest) -> SamplingParams:
    given = {
        name: value
        for name in (
            *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
            *("prompt_logprobs", "bad_words", "allowed_token_ids", "skip_special_tokens"),
            *("include_stop_str_in_output", "truncate_prompt_tokens"),
        )
        if (value := getattr(request, name)) is not None
    }
    params = SamplingParams(**given, stop=stop_strings(request.stop))
    if (wanted := structured_outputs(request)) is not None:
        params.structured_outputs = wanted[1]
    return params
