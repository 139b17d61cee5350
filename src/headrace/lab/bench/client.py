"""One streaming request, timed. Whatever goes wrong becomes the record's kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from headrace.lab.bench.records import Record
from headrace.lab.bench.sse import EventParser, EventTooLongError

if TYPE_CHECKING:
    import aiohttp

_MAX_BODY_BYTES = 64 * 2**20
_DETAIL = 300

ERROR_OF_STATUS = {
    400: "bad_request",
    401: "auth",
    403: "auth",
    404: "not_found",
    408: "timeout",
    413: "bad_request",
    422: "bad_request",
    429: "rate_limited",
    503: "overloaded",
    504: "timeout",
}


class _FailedError(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: dict[str, str],
    timeout_s: float,
    record: Record,
    now: Callable[[], float],
) -> str:
    """POST ``body`` and read the answer to its end into ``record``; returns the answer's text.

    ``now`` is the stage's clock. Only cancellation is raised; every failure is in ``record.error``:
    connection, timeout, auth, not_found, bad_request, rate_limited, overloaded, server_error, not_openai
    (HTML, broken JSON), stream_error (an error event), truncated (a stream without an end).
    """
    import aiohttp

    answer = _Answer(record, now)
    record.sent_s = now()
    old = _Reused()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                old.reused = False
                try:
                    async with session.post(
                        url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=old
                    ) as response:
                        await answer.read(response)
                    break
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # A server may close a connection that is kept open just when it is used again (RFC 9112,
                    # 9.3); of such connections there are finitely many.
                    if not old.reused or answer.begun:
                        raise
    except TimeoutError:
        record.error = "timeout"
        record.detail = (
            f"no end within {timeout_s:g} s" if record.chunk_s else f"nothing within {timeout_s:g} s"
        )
    except _FailedError as failed:
        record.error, record.detail = failed.kind, failed.detail[:_DETAIL]
    except EventTooLongError as error:
        record.error, record.detail = "not_openai", error.message
    except aiohttp.ClientPayloadError as error:
        record.error, record.detail = "truncated", _words(error)
    except (aiohttp.ClientConnectionError, ConnectionError) as error:
        record.error = "truncated" if record.chunk_s else "connection"
        record.detail = _words(error)
    except (aiohttp.ClientError, ValueError) as error:
        record.error, record.detail = "not_openai", _words(error)
    finally:
        record.end_s = now()
    return "".join(answer.text)


class _Reused:
    """Whether a request went out on a connection that an earlier one had opened."""

    reused = False


def connection_trace() -> aiohttp.TraceConfig:
    """Of a session whose requests :func:`ask` sends: lets it try again what met a connection just closed."""
    import aiohttp

    async def note(session: object, context: Any, params: object) -> None:
        if isinstance(context.trace_request_ctx, _Reused):
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return trace


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_DETAIL]


class _Answer:
    """Reads one response into a record."""

    def __init__(self, record: Record, now: Callable[[], float]) -> None:
        self.text: list[str] = []
        self.begun = False
        self._record = record
        self._now = now
        self._done = False
        self._events = 0

    async def read(self, response: aiohttp.ClientResponse) -> None:
        self.begun = True
        if response.status != 200:
            status = response.status
            kind = ERROR_OF_STATUS.get(status, "server_error" if status >= 500 else "bad_request")
            raise _FailedError(kind, f"{status}: {_message(await _body(response))}")
        form = response.content_type
        if "html" in form:
            raise _FailedError("not_openai", "the answer is a web page, not JSON")
        if form == "application/json":
            self._whole(await _body(response))
        else:
            await self._stream(response)

    def _whole(self, body: bytes) -> None:
        value = _object(body)
        self._usage(value)
        for choice in _choices(value):
            message = choice.get("message")
            text = message.get("content") if isinstance(message, dict) else choice.get("text")
            if not isinstance(text, str | None):
                raise _FailedError("not_openai", "the answer's content is not text")
            self.text.append(text or "")
            self._record.finish_reason = choice.get("finish_reason")

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        parser = EventParser()
        async for received in response.content.iter_any():
            at = self._now()
            for data in parser.feed(received):
                self._event(data, at)
        for data in parser.finish():
            self._event(data, self._now())
        if not self._events:
            raise _FailedError("not_openai", f"no events in an answer of type {response.content_type}")
        if not self._done and self._record.finish_reason is None:
            raise _FailedError("truncated", "the stream ended without a finish_reason or [DONE]")

    def _event(self, data: bytes, at: float) -> None:
        self._events += 1
        if data == b"[DONE]":
            self._done = True
            return
        value = _object(data)
        if value.get("error"):
            raise _FailedError("stream_error", _message(data))
        for choice in _choices(value):
            delta = choice.get("delta", choice)
            if isinstance(delta, dict):
                piece = delta.get("content") or delta.get("text") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if piece or thought or delta.get("tool_calls"):
                    self._record.chunk_s.append(at)
                if isinstance(piece, str):
                    self.text.append(piece)
            if choice.get("finish_reason"):
                self._record.finish_reason = str(choice["finish_reason"])
        if value.get("usage"):
            self._usage(value)

    def _usage(self, value: dict[str, Any]) -> None:
        usage = value.get("usage")
        if not isinstance(usage, dict):
            return
        record = self._record
        record.prompt_tokens = _count(usage.get("prompt_tokens"))
        record.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            record.cached_tokens = _count(details.get("cached_tokens"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _choices(value: dict[str, Any]) -> list[dict[str, Any]]:
    choices = value.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise _FailedError("not_openai", f"not JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise _FailedError("not_openai", f"not a JSON object: {data[:80]!r}")
    return value


def _message(body: bytes) -> str:
    """What an error body says: OpenAI's message, or its beginning."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    error = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error) if error else body[:_DETAIL].decode(errors="replace").strip()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    whole = bytearray()
    async for part in response.content.iter_any():
        whole += part
        if len(whole) > _MAX_BODY_BYTES:
            raise _FailedError("not_openai", f"the answer is longer than {_MAX_BODY_BYTES} bytes")
    return bytes(whole)
