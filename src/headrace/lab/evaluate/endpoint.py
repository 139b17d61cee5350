"""A model behind any OpenAI-compatible endpoint, asked through its chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.lab.evaluate.answers import Answer, messages
from headrace.lab.evaluate.endpoint_client import EndpointClient, EndpointError
from headrace.lab.evaluate.questions import Question


class EndpointAnswerer:
    """``model`` at ``url`` (which usually ends in ``/v1``); a key is taken from the environment.

    Raises ConfigError for a URL that is none, or if aiohttp is not installed.
    """

    def __init__(self, url: str, model: str, *, retry_delay_s: float = 1.0) -> None:
        self.context_length: int | None = None
        self._client = EndpointClient(url, retry_delay_s=retry_delay_s)
        self._model = model

    def count_tokens(self, text: str) -> int:
        """An estimate: the endpoint's tokenizer is not known."""
        return len(text) // 4

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions, a few asked at a time. Raises EndpointError."""
        return self._client.map(self._answer, questions)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    async def _answer(self, question: Question) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages(question),
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        if question.stop:
            body["stop"] = list(question.stop)
        what = f"question {question.id}"
        return answer_of(await self._client.post("chat/completions", body, what), what)


def answer_of(body: Any, what: str) -> Answer:
    """The text of a chat completion. Raises EndpointError for anything else."""
    try:
        text = body["choices"][0]["message"]["content"]
        usage = body.get("usage") or {}
        tokens = usage.get("completion_tokens")
    except (LookupError, TypeError, AttributeError):
        text, tokens = 0, None
    if text is None:
        text = ""  # an answer of tool calls only
    if not isinstance(text, str):
        raise EndpointError(f"The answer to {what} is no chat completion: {str(body)[:200]}", 200)
    return Answer(text, tokens if isinstance(tokens, int) else None)
