"""From a request's body to the engine's sampling parameters."""

from __future__ import annotations

from headrace.engine.request import SamplingParams
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
    return params


def _common(request: GenerationRequest) -> SamplingParams:
    given = {
        name: value
        for name in (
            *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
            "skip_special_tokens",
        )
        if (value := getattr(request, name)) is not None
    }
    params = SamplingParams(**given, stop=stop_strings(request.stop))
    if (wanted := structured_outputs(request)) is not None:
        params.structured_outputs = wanted[1]
    return params
