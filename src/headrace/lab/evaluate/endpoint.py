"""A model behind any OpenAI-compatible endpoint, asked through its chat completions."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError
from headrace.lab.evaluate.answers import Answer, messages
from headrace.lab.evaluate.questions import Question

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLES = ("HEADRACE_API_KEY", "OPENAI_API_KEY")
_CONCURRENT = 8
_TRIES = 4
_TIMEOUT_S = 300.0
_ANSWER_LIMIT = 16 * 2**20


class EndpointError(HeadraceError):
    """An endpoint could not be reached, refused, or answered something that is no chat completion."""

    status = 502
    code = "endpoint_failed"


class EndpointAnswerer:
    """``model`` at ``url`` (which usually ends in ``/v1``); a key is taken from the environment.

    Raises ConfigError for a URL that is none, or if aiohttp is not installed.
    """

    def __init__(self, url: str, model: str, *, retry_delay_s: float = 1.0) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise ConfigError("Endpoints need aiohttp: pip install 'headrace[lab]'.") from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of an endpoint, such as http://127.0.0.1:8000/v1.")
        self.context_length: int | None = None
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._retry_delay_s = retry_delay_s

    def count_tokens(self, text: str) -> int:
        """An estimate: the endpoint's tokenizer is not known."""
        return len(text) // 4

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions, a few asked at a time. Raises EndpointError."""
        return asyncio.run(self._answer_all(questions))

    def close(self) -> None:
        """Nothing is held."""

    async def _answer_all(self, questions: Sequence[Question]) -> list[Answer]:
        import aiohttp

        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        free = asyncio.Semaphore(_CONCURRENT)
        async with aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
        ) as session:

            async def one(question: Question) -> Answer:
                async with free:
                    return await self._patiently(session, question)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(question)) for question in questions]
            except* HeadraceError as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _patiently(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        """Tried again after what passes: no connection, 429 and 5xx."""
        import aiohttp

        body = {
            "model": self._model,
            "messages": messages(question),
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(self._retry_delay_s * 2 ** (attempt - 1))
            try:
                async with session.post(self._url, json=body) as response:
                    raw = await response.content.read(_ANSWER_LIMIT)
                    while raw and not response.content.at_eof() and len(raw) < _ANSWER_LIMIT:
                        raw += await response.content.read(_ANSWER_LIMIT - len(raw))
                    status = response.status
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
                continue
            if status == 200:
                return self._answer(raw)
            problem = f"HTTP {status}: {_said(raw)}"
            if status < 500 and status not in (408, 429):
                break
        raise EndpointError(f"{self._url} did not answer question {question.id}: {problem}")

    def _answer(self, raw: bytes) -> Answer:
        try:
            body: Any = json.loads(raw)
            text = body["choices"][0]["message"]["content"]
            usage = body.get("usage") or {}
            tokens = usage.get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            text = raw
            tokens = None
        if text is None:
            text = ""  # an answer of tool calls only
        if not isinstance(text, str):
            raise EndpointError(f"{self._url} answered something that is no chat completion: {_said(raw)}")
        return Answer(text, tokens if isinstance(tokens, int) else None)


def _said(raw: bytes) -> str:
    """The error's message, or the beginning of what came."""
    try:
        message = json.loads(raw)["error"]["message"]
        if isinstance(message, str):
            return message[:300]
    except (ValueError, LookupError, TypeError):
        pass
    return raw[:200].decode("utf-8", "replace") or "an empty body"
