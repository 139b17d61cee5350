"""What a request and the settings may hold: every rule that needs no text and no network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.engine.request import EngineRequest, SamplingParams, StructuredOutputs
from headrace.errors import ContextLengthError, InvalidRequestError, OverloadedError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 100.0
_MAX_COUNT = 2**31 - 1
_HALF_OF_LEAST = 2.0**-150  # of the least float32: what is not above it rounds to zero


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can take in: enough to refuse a request on any thread, or in another process."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    pool_tokens: int  # that the KV pool holds
    max_waiting: int
    embeds: bool = False  # an encoder: every request is an embedding

    def check_request(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError or ContextLengthError if ``request`` can never be served."""
        if not isinstance(request.request_id, str) or not request.request_id:
            raise InvalidRequestError("request_id must be a non-empty string.", param="request_id")
        if not isinstance(request.cache_salt, str):
            raise InvalidRequestError("cache_salt must be a string.", param="cache_salt")
        _whole("priority", request.priority, -(2**31), 2**31 - 1)
        if not isinstance(request.tenant, str):
            raise InvalidRequestError("tenant must be a string.", param="tenant")
        _number("tenant_weight", request.tenant_weight, lambda x: x >= 1e-3, "0.001 or more")
        _number("arrival_time", request.arrival_time)
        _check_ids("eos_token_ids", request.eos_token_ids, None)
        _check_bad_words(request.bad_word_ids, self.vocab_size)
        request.params.validate(self.vocab_size)
        self._check_kind(request)
        self._check_prompt(request.prompt_token_ids)
        if request.output_token_ids:
            self._check_output(request)

    def check_queue(self, num_waiting: int) -> None:
        """Raise OverloadedError if the waiting line is full."""
        if num_waiting >= max(self.max_waiting, 1):
            raise OverloadedError(
                f"The engine is overloaded: {num_waiting} sequences are waiting, which is the limit. "
                "Try again later."
            )

    def _check_kind(self, request: EngineRequest) -> None:
        if request.kind not in ("generate", "embed"):
            raise InvalidRequestError(f"kind must be generate or embed, not {_shown(request.kind)}.")
        if (request.kind == "embed") != self.embeds:
            raise wrong_kind(embeds=self.embeds)
        if self.embeds and request.params.n != 1:
            raise InvalidRequestError("An embedding has one vector: n must be 1.", param="n")

    def _check_prompt(self, prompt: Any) -> None:
        # Lengths first: a prompt of absurd length is refused without a look at its tokens.
        if not isinstance(prompt, list):
            raise InvalidRequestError("The prompt must be a list of token ids.", param="prompt")
        if not prompt:
            raise InvalidRequestError("The prompt is empty; it needs at least one token.", param="prompt")
        if self.embeds and len(prompt) > self.max_model_len:
            raise ContextLengthError(
                f"The model embeds texts of up to {self.max_model_len} tokens, but this one has "
                f"{len(prompt)}. Shorten it, or let truncate_prompt_tokens cut it.",
                param="input",
            )
        if not self.embeds and len(prompt) >= self.max_model_len:
            bound = (
                "The KV pool holds" if self.pool_tokens <= self.max_model_len else "The model's context is"
            )
            raise ContextLengthError(
                f"{bound} {self.max_model_len} tokens, but the prompt has {len(prompt)}; at most "
                f"{self.max_model_len - 1} leave room for an answer. Shorten the prompt.",
                param="prompt",
            )
        _check_ids("prompt", prompt, self.vocab_size)

    def _check_output(self, request: EngineRequest) -> None:
        """What a request that goes on has said must leave each open choice something to say."""
        said, params = request.output_token_ids, request.params
        if self.embeds or len(said) != params.n or not request.open_choices:
            raise InvalidRequestError(
                "output_token_ids must have a list for each of the n choices, or None for one that has "
                "ended, and at least one list.",
                param="output_token_ids",
            )
        for ids in said:
            if ids is None:
                continue
            _check_ids("output_token_ids", ids, self.vocab_size)
            if params.max_tokens is not None and len(ids) >= params.max_tokens:
                raise InvalidRequestError(
                    f"A choice has {len(ids)} tokens already, and max_tokens is {params.max_tokens}: give "
                    "None for it, it has ended.",
                    param="output_token_ids",
                )
            if len(request.prompt_token_ids) + len(ids) >= self.max_model_len:
                raise ContextLengthError(
                    f"The request has {len(request.prompt_token_ids)} tokens of its prompt and {len(ids)} of "
                    f"its answer, but the context holds {self.max_model_len}.",
                    param="output_token_ids",
                )


def wrong_kind(*, embeds: bool) -> InvalidRequestError:
    """What a request gets that asks a decoder for embeddings or an encoder (``embeds``) for text."""
    if embeds:
        return InvalidRequestError(
            "This model embeds texts, it does not generate any: use embeddings, or serve a generating model.",
            param="model",
        )
    return InvalidRequestError(
        "This model generates text, it does not embed any: serve an encoder for that, such as minilm-l6.",
        param="model",
    )


def check_sampling_params(params: SamplingParams, vocab_size: int | None) -> None:
    """Raise InvalidRequestError naming the first field that is wrong and what would be right.

    Without a vocabulary size, token ids are only checked for type and sign.
    """
    _whole("n", params.n, 1, MAX_CHOICES)
    _number("temperature", params.temperature, lambda x: x >= 0, "0 or more")
    _number("top_p", params.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
    _whole("top_k", params.top_k, -1, _MAX_COUNT)
    _number("min_p", params.min_p, lambda x: 0 <= x <= 1, "from 0 to 1")
    _number("presence_penalty", params.presence_penalty, lambda x: -2 <= x <= 2, "from -2 to 2")
    _number("frequency_penalty", params.frequency_penalty, lambda x: -2 <= x <= 2, "from -2 to 2")
    _number("repetition_penalty", params.repetition_penalty, lambda x: x > _HALF_OF_LEAST, "above 0")
    if params.seed is not None:
        _whole("seed", params.seed, -(2**63), 2**64 - 1)
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, 1, _MAX_COUNT)
    _whole("min_tokens", params.min_tokens, 0, _MAX_COUNT)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({params.min_tokens}) must not be above max_tokens ({params.max_tokens}).",
            param="min_tokens",
        )
    if params.timeout_s is not None:
        _number("timeout_s", params.timeout_s, lambda x: x > 0, "above 0")
    if params.logprobs is not None:
        _whole("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _whole("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
        value = getattr(params, name)
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be true or false, not {_shown(value)}.", param=name)
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError(f"{name} must be a list of non-empty strings.", param=name)
    if params.stop and not params.detokenize:
        raise InvalidRequestError(
            "Stop strings are looked for in text, which detokenize=False does not make: use stop_token_ids.",
            param="stop",
        )
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words holds {len(params.bad_words)} words; at most {MAX_BAD_WORDS} are possible.",
            param="bad_words",
        )
    if params.truncate_prompt_tokens is not None:
        _whole("truncate_prompt_tokens", params.truncate_prompt_tokens, -1, _MAX_COUNT)
        if params.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be 1 or more, or -1 for as many as fit, not 0.",
                param="truncate_prompt_tokens",
            )
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if not params.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids must not be empty; leave it out to allow every token.",
                param="allowed_token_ids",
            )
    if params.structured_outputs is not None:
        if not isinstance(params.structured_outputs, StructuredOutputs):
            raise InvalidRequestError(
                "structured_outputs must be a StructuredOutputs, such as "
                'StructuredOutputs(choice=["yes", "no"]).',
                param="structured_outputs",
            )
        params.structured_outputs.source()
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if not isinstance(params.logit_bias, dict):
        raise InvalidRequestError("logit_bias must map token ids to numbers.", param="logit_bias")
    _check_ids("logit_bias", list(params.logit_bias), vocab_size)
    for value in params.logit_bias.values():
        _number("logit_bias", value, lambda x: abs(x) <= MAX_LOGIT_BIAS, "from -100 to 100")


def _check_bad_words(words: Any, vocab_size: int) -> None:
    if not isinstance(words, list) or len(words) > 2 * MAX_BAD_WORDS or not all(words):
        raise InvalidRequestError(
            f"bad_word_ids must be a list of at most {2 * MAX_BAD_WORDS} lists of token ids.",
            param="bad_words",
        )
    for word in words:
        _check_ids("bad_word_ids", word, vocab_size)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    """``value`` is an int (a bool is none) from ``low`` to ``high``."""
    if type(value) is not int:
        raise InvalidRequestError(f"{name} must be a whole number, not {_shown(value)}.", param=name)
    if not low <= value <= high:
        bound = f"{low} or more" if high >= _MAX_COUNT else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {bound}, not {_shown(value)}.", param=name)


def _number(
    name: str, value: Any, fits: Callable[[float], Any] = lambda x: True, wanted: str = "finite"
) -> None:
    """``value`` is a finite int or float (a bool is neither), as a float32 too, and ``fits``."""
    if type(value) is bool or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, not {_shown(value)}.", param=name)
    if (
        not (math.isfinite(value) if isinstance(value, float) else True)
        or abs(value) > 3.4e38
        or not fits(value)
    ):
        raise InvalidRequestError(
            f"{name} must be a finite number, {wanted}, not {_shown(value)}.", param=name
        )


def _check_ids(name: str, ids: Any, vocab_size: int | None) -> None:
    """``ids`` is a list of non-negative ints, below ``vocab_size`` if that is given."""
    if not isinstance(ids, list):
        raise InvalidRequestError(f"{name} must be a list of token ids.", param=name)
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        wrong = next(i for i in ids if type(i) is not int)
        raise InvalidRequestError(
            f"{name} must hold token ids (whole numbers), not {_shown(wrong)}.", param=name
        )
    if vocab_size is None:
        vocab_size = 2**31
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{name} holds {_shown(wrong)}, which is not in the vocabulary (0 to {vocab_size - 1}).",
            param=name,
        )


def _shown(value: Any) -> str:
    """``value`` as it may stand in a message: short, whatever it is."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"  # printing one of thousands of digits raises ValueError
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
