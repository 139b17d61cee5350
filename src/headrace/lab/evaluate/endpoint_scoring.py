"""The log-probabilities that a model behind an endpoint gives to known tokens, if its server can tell them.

Servers differ in how: ``prompt_logprobs`` (vLLM, headrace) or ``echo`` with ``logprobs`` (OpenAI's older
completions), both on the completions route, with prompts of token ids. Which of them works is found out by
asking. Whole distributions are not to be had this way, and so no KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.evaluate.divergence import Window
from headrace.lab.evaluate.endpoint_client import EndpointClient, EndpointError

_PROBE = "The 3 millers opened the gate, and the water came down the race."
_WAYS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 0},
    "echo": {"echo": True, "logprobs": 1},
}
Way = Literal["prompt_logprobs", "echo"]


class EndpointScorer:
    """``model`` at ``url``, with its ``tokenizer``; ``max_tokens``: the longest sequence that is to be sent.

    Raises ConfigError for a URL that is none, a server that tells no log-probabilities of given text, or one
    that cuts text into other tokens; EndpointError if it cannot be asked.
    """

    def __init__(
        self, url: str, model: str, tokenizer: Tokenizer, max_tokens: int, *, retry_delay_s: float = 1.0
    ) -> None:
        self.max_tokens = max_tokens
        self._model = model
        self._tokenizer = tokenizer
        self._client = EndpointClient(url, retry_delay_s=retry_delay_s)
        try:
            self._way = self._find_way()
        except BaseException:
            self._client.close()
            raise

    def losses(
        self, windows: Sequence[Window], advance: Callable[[int], None] = lambda tokens: None
    ) -> list[NDArray[np.float64]]:
        """``-log p`` of the tokens that count of each window, in order. Raises EndpointError."""

        async def one(window: Window) -> NDArray[np.float64]:
            found = await self._log_probs(window.token_ids, self._way)
            advance(window.scored)
            return -found[window.first - 1 :]

        return self._client.map(one, windows)

    def continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """Log-probabilities of each continuation's tokens after ``context``. Raises EndpointError."""

        async def one(continuation: Sequence[int]) -> NDArray[np.float64]:
            found = await self._log_probs([*context, *continuation], self._way)
            return found[len(context) - 1 :]

        return self._client.map(one, continuations)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _find_way(self) -> Way:
        token_ids = self._tokenizer.encode(_PROBE)
        problems = []
        for way in ("prompt_logprobs", "echo"):
            try:
                found = self._client.map(partial(self._ask, way=way), [_PROBE])[0]
                theirs, _ = _tokens(found, way)
            except EndpointError as error:
                if error.http_status not in (200, 400, 404, 405, 422, 501):
                    raise
                problems.append(error.message)
                continue
            ours: list[Any] = list(token_ids)
            if way == "echo":  # texts are told, not ids: their number has to do
                ours, theirs = [len(ours)], [len(theirs)]
            else:
                theirs[0] = ours[0]  # the first token has no probability, so it is not named
            if ours != theirs:
                raise ConfigError(
                    f"{self._client.url} cuts text into other tokens than the tokenizer at hand: name the "
                    "model's own with --tokenizer."
                )
            return way
        raise ConfigError(
            f"{self._client.url} tells no log-probabilities of given text, neither as prompt_logprobs nor "
            "with echo and logprobs on /completions, so only suites that generate can be run. "
            f"It said: {problems[0]}"
        )

    async def _log_probs(self, token_ids: Sequence[int], way: Way) -> NDArray[np.float64]:
        """Of the tokens from the second on."""
        answer = await self._ask(list(token_ids), way)
        theirs, values = _tokens(answer, way)
        named = way == "prompt_logprobs"
        if len(values) != len(token_ids) or (named and theirs[1:] != list(token_ids[1:])):
            raise EndpointError(f"{self._client.url} scored other tokens than it was asked for.", 200)
        found = np.asarray(values[1:], np.float64)
        if not np.isfinite(found).all():
            raise EndpointError(f"{self._client.url} gave log-probabilities that are not finite.", 200)
        return found

    async def _ask(self, prompt: str | list[int], way: Way) -> Any:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **_WAYS[way]}
        return await self._client.post("completions", body, "for the log-probabilities of a text")


def _tokens(answer: Any, way: Way) -> tuple[list[Any], list[float]]:
    """Ids (or, by ``echo``, texts) of the prompt's tokens and their log-probabilities; the first has neither.

    Raises EndpointError if the answer does not hold them.
    """
    try:
        choice = answer["choices"][0]
        if way == "prompt_logprobs":
            entries = choice["prompt_logprobs"]
            # with 0 alternatives each entry holds one token, the prompt's own
            pairs = [
                (int(token), float(it["logprob"])) for entry in entries[1:] for token, it in entry.items()
            ]
            if len(pairs) != len(entries) - 1:
                raise ValueError("several tokens at a position")
            ids: list[Any] = [None, *(token for token, _ in pairs)]
            return ids, [0.0, *(value for _, value in pairs)]
        prompt_tokens = answer["usage"]["prompt_tokens"]
        told = choice["logprobs"]
        texts, values = told["tokens"][:prompt_tokens], told["token_logprobs"][:prompt_tokens]
        return list(texts), [0.0, *(float(value) for value in values[1:])]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise EndpointError(f"The answer holds no log-probabilities: {str(answer)[:200]}", 200) from None
