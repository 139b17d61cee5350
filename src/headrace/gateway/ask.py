"""One question to one upstream over HTTP, and what its failures mean."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, InvalidRequestError, UpstreamError
from headrace.gateway.connections import ConnectTimeoutError, failures, reason_of
from headrace.gateway.kinds import is_overflow, told_error
from headrace.gateway.local import LocalAnswer

if TYPE_CHECKING:
    import aiohttp

    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target

    Answer = aiohttp.ClientResponse | LocalAnswer

LOOK_S = 0.5  # how often those that wait look whether there is still a connection
_MAX_ERROR_BYTES = 64 * 2**10
_MOST_REST_S = 300.0
_MOST_OVERLOADED_S = 5.0


class AttemptError(Exception):
    """The upstream failed, through no fault of the request's: another one may do better.

    ``reason`` is one of a few words, for metrics; ``rested``: it asked to be left alone.
    """

    def __init__(self, reason: str, message: str, *, rested: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.rested = rested


class TooLongError(InvalidRequestError):
    """What the upstream's context cannot hold; another one's may."""


async def ask(
    gateway: Gateway,
    context: RequestContext,
    target: Target,
    body: bytes,
    read: Callable[[Answer], Awaitable[None]],
) -> None:
    """Post ``body`` and have ``read`` take the answer, which is a 200; all within the upstream's timeouts.

    Raises AttemptError, or a HeadraceError that says what is wrong with the request. The answer is closed if
    anything is raised, and else belongs to ``read``.
    """
    times, kind = target.upstream.config.timeouts, target.upstream.kind
    first_s = times.first_byte_s if context.stream else times.answer_s
    wait_s = max(min(first_s, context.deadline - time.monotonic()), 0.0)
    try:
        async with asyncio.timeout(wait_s) as context.patience:
            response: Answer = await (target.upstream.local or gateway.connections).post(
                f"{target.upstream.config.url}/{kind.path(context.route)}",
                data=body,
                headers=target.upstream.headers_for(context),
                connect_s=times.connect_s,
            )
            try:
                if response.status != 200:
                    raise _refusal(target, response, await read_body(response, _MAX_ERROR_BYTES))
                target.upstream.health.accepted()
                await read(response)
            except BaseException:
                response.close()
                raise
    except ConnectTimeoutError as error:
        raise AttemptError("connect", str(error)) from None
    except TimeoutError:
        raise AttemptError("timeout", f"no answer within {wait_s:.3g} seconds") from None
    except failures() as error:
        # what happened has our addresses in it: it is for the log
        reason = reason_of(error)
        gateway.log.warning(
            "attempt failed", request_id=context.id, upstream=target.upstream.name, error=repr(error)
        )
        raise AttemptError(reason, _TOLD[reason]) from None


def is_cut(response: Answer) -> bool:
    """Whether the connection is gone and the answer not at its end.

    aiohttp closes connections on which no HTTP comes any more, but tells nobody who waits for the body.
    """
    if response.content.is_eof() or isinstance(response, LocalAnswer):
        return False
    transport = None if response.connection is None else response.connection.transport
    return transport is None or transport.is_closing()


async def read_some(response: Answer) -> bytes:
    """The next bytes of an answer, none at its end. Raises one of :func:`failures` where it is cut."""
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                return await response.content.readany()
        except TimeoutError:
            if is_cut(response):
                raise OSError("what came is no HTTP") from None


async def read_body(response: Answer, limit: int) -> bytes:
    """All of it. Raises AttemptError if that is more than ``limit`` bytes."""
    parts, size = [], 0
    while part := await read_some(response):
        size += len(part)
        if size > limit:
            raise AttemptError("garbage", f"the answer is over {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def may_try_again(gateway: Gateway, context: RequestContext) -> bool:
    """Whether there is time, and budget, for asking once more; if so, it is taken from the budget."""
    if time.monotonic() >= context.deadline or not gateway.retry_budget.spend():
        return False
    gateway.metrics.retries.inc()
    return True


_TOLD = {
    "connect": "no connection could be made",
    "dropped": "it closed the connection",
    "protocol": "its answer broke off, or was no HTTP",
}


def _refusal(target: Target, response: Answer, body: bytes) -> Exception:
    """What an answer other than 200 means."""
    status, error, health = response.status, told_error(body), target.upstream.health
    message = error[0][:2000] if error else f"status {status}"
    rest_s = _wanted_rest(response)
    if status == 429:
        health.rest(rest_s)
        return AttemptError("rate_limit", message, rested=True)
    if target.upstream.kind.failed(status):
        if status in (503, 529) and rest_s is not None:
            if target.upstream.local is None:  # that one can be asked again for nothing
                health.rest(min(rest_s, _MOST_OVERLOADED_S))
            return AttemptError("overloaded", message, rested=True)
        return AttemptError("status", message)
    if status in (401, 403):  # it is our key that is refused, not the client's
        return UpstreamError(f"the upstream {target.upstream.name} does not accept the gateway's API key")
    if not 400 <= status < 500:
        return AttemptError("garbage", f"status {status}")
    too_long = status in (400, 413, 422) and is_overflow(message, error[3] if error else None)
    made: HeadraceError = TooLongError(message) if too_long else InvalidRequestError(message)
    made.status = status
    if error is not None:
        _, made.type, made.param, made.code = error[0], error[1] or made.type, error[2], error[3]
    return made


def _wanted_rest(response: Answer) -> float | None:
    """For how many seconds it wants to be left alone, if it says so: as a number, or as a date."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = response.headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * unit_s
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if seconds == seconds:
            return min(max(seconds, 0.0), _MOST_REST_S)
    return None
