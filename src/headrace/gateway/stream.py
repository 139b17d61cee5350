"""A stream on its way to a client: from one upstream, and from the next where that one breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, UpstreamError
from headrace.gateway.ask import LOOK_S, AttemptError, ask, is_cut, may_try_again, read_some
from headrace.gateway.connections import failures
from headrace.gateway.resume import Continuation, Progress, continuation, is_resumable
from headrace.gateway.rounds import Rounds
from headrace.gateway.settle import settle
from headrace.gateway.sse import DONE, EventFilter
from headrace.gateway.usage import Usage
from headrace.web.errors import error_event

if TYPE_CHECKING:
    from headrace.gateway.ask import Answer
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target, Work

_LAST_BYTES_S = 1.0  # for what may come behind [DONE]


class RelayedStream:
    """Events for a client. They end in [DONE], or in one error event.

    ``progress``: what the client has been told, if the stream may go on elsewhere; else None. ``work`` is
    ended with the stream, or with the upstream's part in it.
    """

    def __init__(self, gateway: Gateway, context: RequestContext, target: Target, work: Work) -> None:
        self.progress = Progress(context.body) if is_resumable(context) else None
        self._gateway = gateway
        self._context = context
        self._target = target
        self._broke: list[Target] = []  # upstreams that were in the middle of it
        self._work = work
        self._response: Answer | None = None
        self._filter = EventFilter(
            wants_usage=context.wants_usage or context.flight is not None,  # who shares it may want it
            records=context.fingerprint is not None,
            progress=self.progress,
            translate=target.upstream.kind.translation(),
        )
        self._first = b""
        self._at_end = False
        self._problem: str | None = None
        self._silent_s = 0.0  # since something came

    async def begin(self, response: Answer) -> None:
        """Wait for the first event of ``response``, which is this stream's from now on.

        Raises AttemptError: until then, nothing of it has reached the client. Of a resumed stream, what is
        good before an error counts: it is noted as told already.
        """
        if response.content_type != "text/event-stream":
            raise AttemptError("garbage", "a stream was asked for, and something else came")
        self._response, self._first, self._at_end = response, b"", False
        self._problem, self._silent_s = None, 0.0
        while not self._first and not self._filter.done and not self._at_end:
            self._first = self._taken(await read_some(response))
            if self._filter.error is not None and not (self._filter.resumed and self._first):
                raise AttemptError("stream", self._filter.error)
        if not self._first:
            raise AttemptError("garbage", "the stream ended before it had begun")

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        while True:
            events = self._first
            while not (self._filter.done or self._at_end or self._filter.error or self._problem):
                if events:
                    yield events
                events = await self._more()
            problem = self._problem
            if problem is None and not self._filter.complete:
                problem = self._filter.error or "the upstream's stream ended before the answer did"
            if problem is None:
                self._note_end()
                await settle(self._gateway, self._context)  # who has all of an answer finds it in the ledger
                yield events + DONE
                return
            if events:  # what came before the break is good, and another upstream may take its time
                yield events
            if not await self._resume():
                yield self._broken(problem)
                return

    async def _more(self) -> bytes:
        """What the client gets next, perhaps nothing yet; ``_problem`` is what stands in the way of more."""
        assert self._response is not None
        idle_s, left_s = self._target.upstream.config.timeouts.idle_s, self._left_s()
        try:
            wait_s = min(idle_s - self._silent_s, left_s, LOOK_S)
            async with asyncio.timeout(max(wait_s, 0.0)) as self._context.patience:
                data = await self._response.content.readany()
        except TimeoutError:
            self._silent_s += LOOK_S
            if is_cut(self._response):
                self._problem = "the upstream's stream broke off"
            elif self._silent_s >= idle_s or self._left_s() <= 0:
                self._problem = "the upstream fell silent, or the request took longer than it may"
            return b""
        except failures():
            self._at_end = self._filter.all_ended(self._context.choices)
            if not self._at_end:
                self._problem = "the upstream's stream broke off"
            return b""
        self._silent_s = 0.0
        return self._taken(data)

    def _taken(self, data: bytes) -> bytes:
        """What the client gets of the next bytes."""
        self._at_end = not data
        return self._filter.feed(data or b"\n\n")  # the last event counts without its empty line too

    async def _resume(self) -> bool:
        """Have the stream go on at another upstream, whose first events are here then. False: nobody can."""
        gateway, context, progress = self._gateway, self._context, self.progress
        self._let_go()
        if self._left_s() > 0:  # else it is no fault of the upstream's
            gateway.failed(self._target, "mid_stream")
        if progress is None or self._filter.any_ended:
            return False
        self._broke.append(self._target)
        exact = True
        rounds = Rounds(gateway, context, [self._target])
        while context.attempts < gateway.config.retries.attempts:
            target = await rounds.next(rather_not=self._broke)
            if target is None:
                return False
            going_on = continuation(target, context, progress, exact=exact)
            if going_on is None:
                rounds.unfit.append(target)
                exact = True
                continue
            if not may_try_again(gateway, context):
                return False
            context.attempts += 1
            try:
                await self._go_on(target, going_on)
            except AttemptError as error:
                gateway.failed(target, error.reason, passing=error.rested)
                rounds.tried.append(target)
            except HeadraceError as error:
                # it does not take the continuation; of another build of ours, it may take the text
                if going_on.how == "exact" and error.code == "fingerprint_mismatch":
                    exact = False
                    continue
                gateway.log.warning(
                    "not resumed", request_id=context.id, upstream=target.upstream.name, error=error.message
                )
                rounds.unfit.append(target)
            else:
                return True
            exact = True
        return False

    async def _go_on(self, target: Target, going_on: Continuation) -> None:
        """Ask ``target`` for the rest. Raises as :func:`ask` does, and then nothing of it is left."""
        gateway, context = self._gateway, self._context
        self._work = target.upstream.begin(context.prompt_tokens + context.output_tokens)
        context.works.append(self._work)
        self._filter.go_on(going_on, target.upstream.kind.translation())
        try:
            await ask(gateway, context, target, going_on.body, self.begin)
        except BaseException:
            self._let_go()
            raise
        self._first = going_on.label + self._first
        self._target = context.target = target
        context.note_resumed(going_on.how)
        gateway.metrics.resumed.labels(target.upstream.name, going_on.how).inc()
        gateway.affinity.note(context, target.upstream)
        gateway.log.info(
            "stream resumed", request_id=context.id, upstream=target.upstream.name, how=going_on.how
        )

    def _broken(self, problem: str) -> bytes:
        self._context.outcome = "failed"
        self._filter.error = problem
        return error_event(UpstreamError(problem))

    def _left_s(self) -> float:
        return self._context.deadline - time.monotonic()

    def _let_go(self) -> None:
        """The upstream works on this no more."""
        if self._response is not None:
            self._response.close()
        self._work.end()

    async def aclose(self) -> None:
        """Let go of the upstream, and note what was used."""
        response = self._response
        if self._filter.complete and not self._at_end and response is not None:
            # Only once: reading what was let go raises an exception, of which aiohttp has but one, and
            # its traceback would keep this stream, and all others that did so, for ever.
            self._at_end = True
            try:  # a connection that is read to its end can be used again
                async with asyncio.timeout(_LAST_BYTES_S):
                    while await response.content.readany():
                        pass
            except Exception:
                response.close()
        if self._filter.complete and response is not None:
            response.release()
            self._work.end()
            self._target.upstream.health.succeeded()
        else:
            self._let_go()
        self._note_end()

    def _note_end(self) -> None:
        """How it ended, and what was used."""
        context = self._context
        context.first_token_at = self._filter.first_token_at
        if self._filter.complete and self._response is not None:
            context.recorded = self._filter.record
            context.outcome = "ok"
        elif self._filter.error is None:
            context.outcome = "cancelled"
        context.usage = self._filter.usage or Usage(
            context.prompt_tokens, self._filter.num_tokens, estimated=True
        )
