"""RevivingClient: an engine that is started again when its process dies, and goes on with what it had."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from headrace.engine.client import EngineClient, OutputSink
from headrace.engine.grammar import GrammarCompiler
from headrace.engine.request import EngineOutput, EngineRequest, EngineStats
from headrace.engine.saved import GIVEN_UP, MAX_DEATHS
from headrace.errors import EngineDeadError, GenerationError, HeadraceError, OverloadedError

_log = logging.getLogger(__name__)


class RevivingClient:
    """An EngineClient over those that ``reopen`` makes, one after the other.

    Whoever waits for a request notices nothing but the time that it takes: it is submitted again with the
    tokens that it has. So its parameters must name a seed. While there is no engine, submitting raises
    OverloadedError. A request that is part of several deaths in a row without a new token ends with an
    error, and if an engine cannot be started again all end as after any death.
    """

    journal = None

    def __init__(self, reopen: Callable[[], EngineClient]) -> None:
        """Raises what ``reopen`` raises."""
        self._reopen = reopen
        self._client = reopen()
        self.architecture = self._client.architecture
        self.capabilities = self._client.capabilities
        self.max_model_len = self._client.max_model_len
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._compiler: GrammarCompiler | None = None
        self._life = 0  # number of the engine that works, or is being started
        self._reviving = False
        self._over = False  # closed, or not to be started again

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """See EngineClient.use_grammars."""
        with self._lock:
            self._compiler = compiler
        self._client.use_grammars(compiler)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See EngineClient.submit."""
        each = _Open(request, sink)
        with self._lock:
            if self._reviving:
                raise _restarting()
            client, each.life = self._client, self._life
            is_new = request.request_id not in self._open  # if not, the client will say so
            if is_new:
                self._open[request.request_id] = each
        try:
            client.submit(request, partial(self._receive, each, each.life))
        except BaseException as error:
            dead = isinstance(error, EngineDeadError) and self._died(each.life)
            with self._lock:
                if dead and each.life != self._life and not self._reviving:
                    return  # the next engine has it already
                if is_new:
                    self._open.pop(request.request_id, None)
            if dead:
                raise _restarting() from None
            raise

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineClient.abort."""
        with self._lock:
            each = self._open.get(request_id) if self._reviving else None
            ended = [] if each is None else each.end(choice)
            if each is not None and not each.choices:
                del self._open[request_id]
            client = self._client
        if each is None:
            client.abort(request_id, choice)
        elif ended:
            each.sink([_end(request_id, number, "abort") for number in ended])

    def stats(self) -> EngineStats:
        """See EngineClient.stats. Counters begin anew with each engine."""
        return self._client.stats()

    def close(self, timeout_s: float = 5.0) -> None:
        """See EngineClient.close."""
        with self._lock:
            self._over = True
        self._client.close(timeout_s)
        self._end_all("abort")

    def _receive(self, each: _Open, life: int, outputs: list[EngineOutput]) -> None:
        """News of a request from the engine of that number: on a thread of its client's."""
        news = [output for output in outputs if output.error_kind != EngineDeadError.__name__]
        with self._lock:
            each.take(news)
            if not each.choices and self._open.get(each.request.request_id) is each:
                del self._open[each.request.request_id]
        if news:
            each.sink(news)
        if len(news) < len(outputs) and not self._died(life):
            dead = [output for output in outputs if output.error_kind == EngineDeadError.__name__]
            with self._lock:
                self._open.pop(each.request.request_id, None)
            each.sink(dead)

    def _died(self, life: int) -> bool:
        """An engine is dead; whether its requests go on."""
        with self._lock:
            if self._over:
                return False
            if life == self._life:
                self._life += 1
                self._reviving = True
                threading.Thread(target=self._revive, name="headrace-revive", daemon=True).start()
            return True

    def _revive(self) -> None:
        """Start an engine and give it what the last one had."""
        _log.error("The engine has died: starting it again, with %d requests.", len(self._open))
        try:
            fresh = self._reopen()
        except Exception as error:
            _log.critical("The engine cannot be started again.", exc_info=error)
            with self._lock:
                self._over, self._reviving = True, False
            self._end_all("error")
            return
        with self._lock:
            if not self._over:
                self._client, self._reviving = fresh, False
                if self._compiler is not None:
                    fresh.use_grammars(self._compiler)
                waiting = list(self._open.values())
                for each in waiting:
                    each.life = self._life
        if self._over:
            fresh.close()
            return
        for each in waiting:
            self._go_on(each, fresh)

    def _go_on(self, each: _Open, client: EngineClient) -> None:
        name = each.request.request_id
        try:
            each.count_death()
            client.submit(each.rest(), partial(self._receive, each, each.life))
        except EngineDeadError:
            self._died(each.life)  # and the next one goes on with it
        except HeadraceError as error:
            with self._lock:
                self._open.pop(name, None)
            each.sink([_end(name, choice, "error", error) for choice in sorted(each.choices)])
        else:
            with self._lock:
                left = self._open.get(name) is not each and bool(each.choices)
            if left:  # its owner left meanwhile
                client.abort(name)

    def _end_all(self, finish_reason: str) -> None:
        """End what no engine has, if anything."""
        with self._lock:
            left, self._open = list(self._open.values()), {}
        error = EngineDeadError("The engine died, and could not be started again.")
        why = error if finish_reason == "error" else None
        for each in left:
            name = each.request.request_id
            each.sink([_end(name, choice, finish_reason, why) for choice in sorted(each.choices)])


class _Open:
    """A request that has not ended. ``choices``: those that have not. ``life``: of the engine that has it."""

    __slots__ = ("_deaths", "_known", "_said", "choices", "life", "request", "sink")

    def __init__(self, request: EngineRequest, sink: OutputSink) -> None:
        self.request = request
        self.sink = sink
        self.choices = set(request.open_choices)
        self.life = 0
        before = request.output_token_ids or [[] for _ in range(request.params.n)]
        self._said: list[list[int]] = [[*(ids or ())] for ids in before]
        self._known = self._deaths = 0

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Note what is new."""
        for output in outputs:
            self._said[output.choice] += output.token_ids
            if output.finish_reason is not None:
                self.choices.discard(output.choice)

    def end(self, choice: int | None) -> list[int]:
        """End one choice, or all; those that had not ended."""
        ended = sorted(self.choices if choice is None else self.choices & {choice})
        self.choices -= set(ended)
        return ended

    def count_death(self) -> None:
        """Its engine has died. Raises GenerationError if it has been part of too many."""
        known = sum(map(len, self._said))
        self._deaths = self._deaths + 1 if known == self._known else 1
        self._known = known
        if self._deaths >= MAX_DEATHS:
            raise GenerationError(GIVEN_UP)

    def rest(self) -> EngineRequest:
        """The request, as it goes on."""
        if self.request.kind == "embed":
            return msgspec.structs.replace(self.request, restarted=True)
        said = [[*ids] if choice in self.choices else None for choice, ids in enumerate(self._said)]
        return msgspec.structs.replace(self.request, output_token_ids=said, restarted=True)


def _end(
    request_id: str, choice: int, finish_reason: str, error: HeadraceError | None = None
) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        choice=choice,
        finish_reason=finish_reason,
        error_kind=None if error is None else type(error).__name__,
        error_message=None if error is None else error.message,
    )


def _restarting() -> OverloadedError:
    return OverloadedError("The engine has died and is being started again; try again in a moment.")
