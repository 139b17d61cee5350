"""What LLM's methods are given: one of a thing or a list of them, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.engine.request import SamplingParams
from headrace.errors import InvalidRequestError


def listed(prompts: Any) -> Sequence[Any]:
    """One prompt, or several, as a list. Raises InvalidRequestError for what is neither."""
    if not isinstance(prompts, (Sequence, Mapping)):
        raise InvalidRequestError(f"prompts must be a prompt or a list of them, not {prompts!r:.60}.")
    one = isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts)
    return [prompts] if one else list(prompts)


def text_or_ids(prompt: Any) -> Any:
    """What a prompt holds: a string, or what should be a list of ids. Raises InvalidRequestError."""
    if isinstance(prompt, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if len(keys) != 1:
            raise InvalidRequestError(
                "A prompt given as a dict needs either 'prompt' (text) or 'prompt_token_ids' (a list)."
            )
        prompt, is_text = prompt[keys[0]], keys[0] == "prompt"
    else:
        is_text = not _is_token_ids(prompt)
    if is_text != isinstance(prompt, str):
        raise InvalidRequestError(
            "A prompt must be a string, a list of token ids, {'prompt': text} or "
            f"{{'prompt_token_ids': [ids]}}, not {type(prompt).__name__}."
        )
    return prompt


def say_which(
    encode: Callable[[Any], tuple[str | None, list[int]]], item: Any, index: int, count: int
) -> tuple[str | None, list[int]]:
    """``encode(item)``; what it refuses says which of the ``count`` prompts it was."""
    try:
        return encode(item)
    except InvalidRequestError as error:
        if count > 1:
            error.message = f"prompt {index} of {count}: {error.message}"
            error.args = (error.message,)
        raise


def priorities_of(priority: Sequence[int] | None, count: int) -> Sequence[int]:
    """One priority for each of ``count`` prompts. Raises InvalidRequestError for what is no such list."""
    if priority is None:
        return [0] * count
    whole = isinstance(priority, Sequence) and all(
        type(each) is int and -(2**31) <= each < 2**31 for each in priority
    )
    if not whole or len(priority) != count:
        raise InvalidRequestError(
            f"priority must be a list of {count} whole numbers of 32 bits, one per prompt.", param="priority"
        )
    return priority


def params_of(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of ``count`` prompts. Raises InvalidRequestError for what is no such list."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequestError("sampling_params must be a SamplingParams or a list of them.")
    if len(params) != count:
        raise InvalidRequestError(
            f"There are {count} prompts but {len(params)} sampling_params; give one for all, or one each."
        )
    return list(params)


def _is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, (list, tuple)) and bool(prompts) and all(type(i) is int for i in prompts)
