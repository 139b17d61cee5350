"""Subscribers: who waits for which outputs. Each sequence gets exactly one end, whatever happens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from headrace.engine.client import OutputSink
from headrace.engine.loop import News
from headrace.engine.request import EngineOutput, EngineRequest, EngineStats
from headrace.engine.validate import EngineLimits
from headrace.errors import EngineDeadError, InvalidRequestError

_log = logging.getLogger(__name__)


class _Subscription:
    __slots__ = ("open_choices", "sink")

    def __init__(self, sink: OutputSink, choices: Iterable[int]) -> None:
        self.sink = sink
        self.open_choices = set(choices)


class Subscribers:
    """The client's half of the engine: checks requests, keeps their sinks, delivers outputs and ends.

    Thread-safe. ``send`` passes a checked request on to the engine and ``abort`` ends one.
    """

    def __init__(
        self, limits: EngineLimits, send: Callable[[EngineRequest], None], abort: Callable[[str], None]
    ) -> None:
        self.stats = EngineStats()
        self._limits = limits
        self._send = send
        self._abort = abort
        self._lock = threading.Lock()
        self._open: dict[str, _Subscription] = {}
        self._num_sent = 0
        self._num_received = 0
        self._dead: str | None = None

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Check and send a request. Raises as EngineClient.submit does; then the sink is never called."""
        self._limits.check_request(request)
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            if request.request_id in self._open:
                raise InvalidRequestError(
                    f"A request {request.request_id!r} is under way already; use another id.",
                    param="request_id",
                )
            if not request.restarted:
                self._limits.check_queue(self.stats.num_waiting_seqs + self._num_sent - self._num_received)
            self._open[request.request_id] = _Subscription(sink, request.open_choices)
            self._num_sent += 1
        try:
            self._send(request)
        except BaseException:
            with self._lock:
                told = self._open.pop(request.request_id, None) is None
                self._num_sent -= 1
            if not told:
                raise

    def deliver(self, news: News) -> None:
        """Take in a turn's news and hand every request its own outputs."""
        calls: dict[str, tuple[OutputSink, list[EngineOutput]]] = {}
        with self._lock:
            if news.stats is not None:
                self.stats = news.stats
                self._num_received = news.num_received
            for output in news.outputs:
                request_id = output.request_id
                subscription = self._open.get(request_id)
                if subscription is None or output.choice not in subscription.open_choices:
                    continue
                call = calls.get(request_id)
                if call is None:
                    calls[request_id] = subscription.sink, [output]
                else:
                    call[1].append(output)
                if output.finish_reason is not None:
                    subscription.open_choices.discard(output.choice)
                    if not subscription.open_choices:
                        del self._open[request_id]
        for request_id, (sink, outputs) in calls.items():
            if not _call(sink, outputs):
                self._abort(request_id)

    def end_all(self, why_dead: str, *, finish_reason: str) -> None:
        """Refuse new requests with EngineDeadError and end all open ones. Only the first call counts."""
        with self._lock:
            if self._dead is None:
                self._dead = why_dead
            subscriptions, self._open = self._open, {}
            self.stats = msgspec.structs.replace(
                self.stats,
                num_running_seqs=0,
                num_waiting_seqs=0,
                num_tenants=0,
                num_free_blocks=self.stats.num_blocks,
                kv_cache_usage=0.0,
            )
        error = finish_reason == "error"
        for request_id, subscription in subscriptions.items():
            outputs = [
                EngineOutput(
                    request_id=request_id,
                    choice=choice,
                    finish_reason=finish_reason,
                    error_kind="EngineDeadError" if error else None,
                    error_message=why_dead if error else None,
                )
                for choice in sorted(subscription.open_choices)
            ]
            _call(subscription.sink, outputs)


def _call(sink: OutputSink, outputs: list[EngineOutput]) -> bool:
    """Whether the sink took its outputs: one that raises must not take the engine or its neighbours along."""
    try:
        sink(outputs)
    except Exception:
        _log.exception("An output sink failed; its request %s is aborted.", outputs[0].request_id)
        return False
    return True
