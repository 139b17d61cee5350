"""EngineLoop: the one thread that owns an engine, and its inbox."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from headrace.engine.engine import Engine
from headrace.engine.grammar import Grammar
from headrace.engine.request import EngineOutput, EngineRequest, EngineStats, refusal
from headrace.errors import HeadraceError

_log = logging.getLogger(__name__)
_STATS_EVERY_S = 0.1


class Abort(msgspec.Struct, tag="abort"):
    """End a request, or one of its sequences."""

    request_id: str
    choice: int | None = None


class Stop(msgspec.Struct, tag="stop"):
    """Abort everything and leave."""


class News(msgspec.Struct, tag="news"):
    """What a turn of the loop brought. ``num_received``: requests taken from the inbox since start.

    ``stats`` come along when a sequence came, went or began to wait, and now and then; else None.
    """

    outputs: list[EngineOutput]
    stats: EngineStats | None
    num_received: int


Command = EngineRequest | Abort | Stop


class EngineLoop:
    """Runs ``engine`` on a thread of its own until told to stop; sleeps while there is nothing to do.

    ``on_news`` is called on that thread after every turn that brought any; ``on_end`` once, as its last act,
    with the error that ended the engine, or None. The engine is closed before ``on_end``.
    """

    def __init__(
        self, engine: Engine, on_news: Callable[[News], None], on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._engine = engine
        self._on_news = on_news
        self._on_end = on_end
        # append and popleft are atomic: no lock
        self._inbox: deque[tuple[Command, Grammar | HeadraceError | None]] = deque()
        self._wake = threading.Event()
        self._num_received = 0
        self._census = (0, 0, 0)  # requests received, sequences running and waiting, as they were last told
        self._stats_due = 0.0
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command, grammar: Grammar | HeadraceError | None = None) -> None:
        """Hand a checked command to the engine's thread; it acts before its next step. Any thread.

        ``grammar``: what a request's ``structured_outputs`` were compiled to, or why they could not be.
        """
        self._inbox.append((command, grammar))
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; True if it has. On the thread itself: does not wait."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._turn_until_stopped()
        except BaseException as caught:
            _log.critical("The engine died.", exc_info=caught)
            error = caught
        try:
            self._engine.close(save=error is None)  # what broke may have broken blocks
        finally:
            self._on_end(error)

    def _turn_until_stopped(self) -> None:
        engine = self._engine
        while True:
            if not engine.has_work:
                self._wake.wait()
                self._wake.clear()  # before the inbox is read: what comes later sets it again
            outputs, stop = self._read_inbox()
            if not stop and engine.has_work:
                outputs += engine.step()
            stats = self._stats_if_due()
            if outputs or stats is not None:
                self._on_news(News(outputs, stats, self._num_received))
            if stop:
                return

    def _stats_if_due(self) -> EngineStats | None:
        """A snapshot, if the last one no longer says how many sequences there are, or is old."""
        scheduler, now = self._engine.scheduler, time.monotonic()
        census = self._num_received, scheduler.num_running, scheduler.num_waiting
        if census == self._census and now < self._stats_due:
            return None
        self._census, self._stats_due = census, now + _STATS_EVERY_S
        return self._engine.stats()

    def _read_inbox(self) -> tuple[list[EngineOutput], bool]:
        outputs: list[EngineOutput] = []
        while self._inbox:
            command, grammar = self._inbox.popleft()
            if isinstance(command, EngineRequest):
                self._num_received += 1
                if isinstance(grammar, HeadraceError):
                    outputs += refusal(command, grammar)
                else:
                    self._engine.enqueue(command, grammar)
            elif isinstance(command, Abort):
                outputs += self._engine.abort(command.request_id, command.choice)
            else:
                return outputs + self._engine.scheduler.abort_all(), True
        return outputs, False
