"""One attempt at one upstream: a whole answer, or a stream whose first event is here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import orjson

from headrace.errors import HeadraceError, InvalidRequestError, UpstreamError
from headrace.gateway.kinds import told_error
from headrace.gateway.sse import DONE, EventFilter
from headrace.gateway.usage import Usage, prompt_estimate, told
from headrace.web.errors import error_event

if TYPE_CHECKING:
    import aiohttp

    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target, Work

_MAX_ANSWER_BYTES = 64 * 2**20
_MAX_ERROR_BYTES = 64 * 2**10
_REST_S = 1.0  # after a 429 that does not say for how long
_MOST_REST_S = 300.0
_LAST_BYTES_S = 1.0  # for what may come behind [DONE]


class AttemptError(Exception):
    """The upstream failed, through no fault of the request's: another one may do better.

    ``reason`` is one of a few words, for metrics; ``rested``: it asked to be left alone.
    """

    def __init__(self, reason: str, message: str, *, rested: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.rested = rested


async def attempt(gateway: Gateway, context: RequestContext, target: Target, work: Work) -> None:
    """Fill in the answer, and the usage if it is whole; a stream's comes when it ends, and ends ``work``.

    Raises AttemptError, or a HeadraceError that says what is wrong with the request.
    """
    import aiohttp

    times = target.upstream.config.timeouts
    first_s = times.first_byte_s if context.stream else times.answer_s
    try:
        wait_s = max(min(first_s, context.deadline - time.monotonic()), 0.0)
        async with asyncio.timeout(wait_s) as context.patience:
            response = await gateway.session.post(
                f"{target.upstream.config.url}/{context.route}",
                data=target.upstream.kind.body(
                    context.body, target.name, chat=context.route == "chat/completions"
                ),
                headers=target.upstream.headers_for(context),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=times.connect_s),
            )
            try:
                await _read(gateway, context, target, work, response)
            except BaseException:
                response.close()
                raise
    except aiohttp.ServerTimeoutError:
        raise AttemptError("connect", f"no connection within {times.connect_s:g} seconds") from None
    except TimeoutError:
        raise AttemptError("timeout", f"no answer within {wait_s:.3g} seconds") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # what happened has our addresses in it: it is for the log
        reason = _reason(error)
        gateway.log.warning(
            "attempt failed", request_id=context.id, upstream=target.upstream.name, error=repr(error)
        )
        raise AttemptError(reason, _TOLD[reason]) from None


_TOLD = {
    "connect": "no connection could be made",
    "dropped": "it closed the connection",
    "protocol": "its answer broke off, or was no HTTP",
}


def _reason(error: Exception) -> str:
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)):
        return "dropped"
    return "protocol"


async def _read(
    gateway: Gateway, context: RequestContext, target: Target, work: Work, response: aiohttp.ClientResponse
) -> None:
    if response.status != 200:
        body = await _body(response, _MAX_ERROR_BYTES)
        raise _refusal(target, response, body)
    gateway.metrics.first_byte.labels(context.model).observe(time.monotonic() - context.began)
    if not context.stream:
        context.answer = await _whole(context, response)
        return
    if response.content_type != "text/event-stream":
        raise AttemptError("garbage", "a stream was asked for, and something else came")
    stream = RelayedStream(gateway, context, target, work, response)
    await stream.begin()
    context.answer = stream


async def _whole(context: RequestContext, response: aiohttp.ClientResponse) -> bytes:
    body = await _body(response, _MAX_ANSWER_BYTES)
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise AttemptError("garbage", "the answer is not JSON") from None
    part = "data" if context.route == "embeddings" else "choices"
    if not isinstance(answer, dict) or not isinstance(answer.get(part), list) or not answer[part]:
        error = told_error(body)
        raise AttemptError("garbage", error[0] if error else f"the answer has no {part}")
    context.usage = told(answer.get("usage")) or Usage(
        context.prompt_tokens, prompt_estimate({"input": answer.get("choices")}), estimated=True
    )
    if context.fingerprint is not None:
        context.recorded = body
    return body


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit:
            raise AttemptError("garbage", f"the answer is over {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _refusal(target: Target, response: aiohttp.ClientResponse, body: bytes) -> Exception:
    """What an answer other than 200 means."""
    status, error = response.status, told_error(body)
    message = error[0][:2000] if error else f"status {status}"
    if status == 429:
        rest = _seconds(response.headers.get("retry-after"))
        target.upstream.health.rest(rest)
        return AttemptError("rate_limit", message, rested=True)
    if target.upstream.kind.failed(status):
        if status == 503 and "retry-after" in response.headers:
            target.upstream.health.rest(min(_seconds(response.headers["retry-after"]), 5.0))
            return AttemptError("overloaded", message, rested=True)
        return AttemptError("status", message)
    if status in (401, 403):  # it is our key that is refused, not the client's
        return UpstreamError(f"the upstream {target.upstream.name} does not accept the gateway's API key")
    if not 400 <= status < 500:
        return AttemptError("garbage", f"status {status}")
    made: HeadraceError = InvalidRequestError(message)
    made.status = status
    if error is not None:
        _, made.type, made.param, made.code = error[0], error[1] or made.type, error[2], error[3]
    return made


def _seconds(text: str | None) -> float:
    """A retry-after in seconds; dates and nonsense count as none."""
    try:
        seconds = float(text or "")
    except ValueError:
        return _REST_S
    return min(max(seconds, 0.0), _MOST_REST_S) if seconds == seconds else _REST_S


class RelayedStream:
    """A stream on its way from an upstream to a client. It ends in [DONE], or in one error event."""

    def __init__(
        self,
        gateway: Gateway,
        context: RequestContext,
        target: Target,
        work: Work,
        response: aiohttp.ClientResponse,
    ) -> None:
        self._gateway = gateway
        self._context = context
        self._target = target
        self._work = work
        self._response = response
        self._idle_s = target.upstream.config.timeouts.idle_s
        self._filter = EventFilter(wants_usage=context.wants_usage, records=context.fingerprint is not None)
        self._first = b""
        self._at_end = False

    async def begin(self) -> None:
        """Wait for the first event. Raises AttemptError: until then, nothing has reached the client."""
        while not self._first and not self._filter.done and not self._at_end:
            self._first = await self._next()
            if self._filter.error is not None:
                raise AttemptError("stream", self._filter.error)
        if not self._first:
            raise AttemptError("garbage", "the stream ended before it had begun")

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        import aiohttp

        events, problem = self._first, None
        while not (self._filter.done or self._at_end or self._filter.error is not None):
            if events:
                yield events
                events = b""
            try:
                wait_s = min(self._idle_s, self._context.deadline - time.monotonic())
                async with asyncio.timeout(max(wait_s, 0.0)) as self._context.patience:
                    events = await self._next()
            except TimeoutError:
                problem = "the upstream fell silent, or the request took longer than it may"
                break
            except (aiohttp.ClientError, OSError):
                if not self._filter.all_ended(self._context.choices):
                    problem = "the upstream's stream broke off"
                break
        if problem is None and not self._filter.complete:
            problem = self._filter.error or "the upstream's stream ended before the answer did"
        yield events + (DONE if problem is None else self._broken(problem))

    async def _next(self) -> bytes:
        """What the client gets of the next bytes."""
        data = await self._response.content.readany()
        self._at_end = not data
        return self._filter.feed(data or b"\n\n")  # the last event counts without its empty line too

    def _broken(self, problem: str) -> bytes:
        self._gateway.failed(self._target, "mid_stream")
        self._context.outcome = "failed"
        self._filter.error = problem
        return error_event(UpstreamError(problem))

    async def aclose(self) -> None:
        """Let go of the upstream, and note what was used."""
        context, told_usage = self._context, self._filter.usage
        context.first_token_at = self._filter.first_token_at
        if self._filter.complete and not self._at_end:
            try:  # a connection that is read to its end can be used again
                async with asyncio.timeout(_LAST_BYTES_S):
                    while await self._response.content.readany():
                        pass
            except Exception:
                self._response.close()
        if self._filter.complete:
            self._response.release()
            context.recorded = self._filter.record
            context.outcome = "ok"
            self._target.upstream.health.succeeded()
        else:
            self._response.close()
            if self._filter.error is None:
                context.outcome = "cancelled"
        self._work.end()
        context.usage = told_usage or Usage(context.prompt_tokens, self._filter.chunks, estimated=True)
