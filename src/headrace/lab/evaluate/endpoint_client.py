"""POST to an OpenAI-compatible endpoint, a few at a time, patiently but not for ever."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLES = ("HEADRACE_API_KEY", "OPENAI_API_KEY")
_CONCURRENT = 8
_TRIES = 4
_TIMEOUT_S = 300.0
_LONGEST_WAIT_S = 60.0
_ANSWER_LIMIT = 64 * 2**20
_HINTS = {
    401: "the key is missing or wrong; put the right one into {keys}",
    403: "the key may not do that; put another one into {keys}",
    404: "check the address, which usually ends in /v1, and the model's name",
}
Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointError(HeadraceError):
    """An endpoint could not be reached, refused, or answered something that is not what was asked for.

    ``http_status`` is that of its last answer; None if there was none.
    """

    status = 502
    code = "endpoint_failed"

    def __init__(self, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status


class EndpointClient:
    """``url`` usually ends in ``/v1``; the key is the first of ``key_variables`` that the environment has.

    Connections that fail, 408, 429 and 5xx are tried again, four times in all. ``retry-after`` is honoured up
    to a minute; a server that wants more is not waited for. Close it when done. Raises ConfigError for a
    URL that is none, or if aiohttp is not installed.
    """

    def __init__(
        self, url: str, *, key_variables: Sequence[str] = KEY_VARIABLES, retry_delay_s: float = 1.0
    ) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise ConfigError("Endpoints need aiohttp: pip install 'headrace[lab]'.") from None
        require_url(url)
        self.url = url.rstrip("/")
        self._key_variables = tuple(key_variables)
        self._retry_delay_s = retry_delay_s
        self._runner: asyncio.Runner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._free: asyncio.Semaphore | None = None

    def map(self, ask: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        """``ask`` of every item, in their order. The first error ends the others and is raised."""
        if self._runner is None:
            self._runner, self._free = asyncio.Runner(), asyncio.Semaphore(_CONCURRENT)
        return self._runner.run(self._map(ask, items))

    async def post(self, path: str, body: dict[str, Any], what: str) -> Any:
        """The JSON that ``url/path`` answers. Raises EndpointError, which says for ``what`` it was asked."""
        assert self._free is not None  # post is for functions that map runs
        async with self._free:
            return await self._patiently(f"{self.url}/{path}", body, what)

    def close(self) -> None:
        """Close connections."""
        if self._runner is not None:
            if self._session is not None:
                self._runner.run(self._session.close())
            self._runner.close()
        self._runner = self._session = None

    async def _map(self, ask: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> list[Result]:
        async def one(item: Item) -> Result:
            return await ask(item)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in items]
        except* HeadraceError as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _patiently(self, url: str, body: dict[str, Any], what: str) -> Any:
        import aiohttp

        problem, status, wait_s = "", None, 0.0
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(wait_s or self._retry_delay_s * 2 ** (attempt - 1))
            try:
                async with self._opened().post(url, json=body, allow_redirects=False) as response:
                    raw = await _bounded(response)
                    status, wait_s = response.status, _retry_after_s(response.headers.get("retry-after"))
            except (aiohttp.ClientError, TimeoutError) as error:
                problem, status, wait_s = f"no answer: {str(error) or type(error).__name__}", None, 0.0
                continue
            if status == 200:
                return self._parsed(url, raw, what)
            hint = _HINTS.get(status, "").format(keys=" or ".join(self._key_variables))
            problem = f"HTTP {status}: {said(raw)}" + (f" ({hint})" if hint else "")
            if status < 500 and status not in (408, 429):
                break
            if wait_s > _LONGEST_WAIT_S:
                problem += f" (it asks to wait {wait_s:.0f} s; try again then)"
                break
        raise EndpointError(f"{url} did not answer {what}: {problem}", status)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            key = next((os.environ[name] for name in self._key_variables if os.environ.get(name)), None)
            self._session = aiohttp.ClientSession(
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            )
        return self._session

    def _parsed(self, url: str, raw: bytes, what: str) -> Any:
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            raise EndpointError(
                f"{url} answered {what} with something that is no JSON: {said(raw)}", 200
            ) from None
        if isinstance(answer, dict) and answer.get("error"):
            raise EndpointError(f"{url} did not answer {what}: {said(raw)}", 200)
        return answer


def require_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is one of HTTP."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        found = False
    if not found:
        raise ConfigError(f"{url!r} is not the URL of an endpoint, such as http://127.0.0.1:8000/v1.")


def said(raw: bytes) -> str:
    """The error's message, or the beginning of what came."""
    try:
        message = json.loads(raw)["error"]["message"]
        if isinstance(message, str):
            return message[:300]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return " ".join(raw[:200].decode("utf-8", "replace").split()) or "an empty body"


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _ANSWER_LIMIT:
            break
    return bytes(raw)


def _retry_after_s(value: str | None) -> float:
    """Seconds, or a date, as RFC 9110 has it; 0 for anything else."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
