"""ThreadClient: an engine on a thread of this process."""

from __future__ import annotations

from headrace.engine.client import OutputSink
from headrace.engine.engine import Engine
from headrace.engine.grammar import GrammarCompiler, compiled
from headrace.engine.loop import Abort, EngineLoop, Stop
from headrace.engine.request import EngineRequest, EngineStats
from headrace.engine.subscribers import Subscribers

CLOSED = "The engine is closed."


class ThreadClient:
    """An EngineClient that owns ``engine`` and runs it on a thread. Sinks are called on that thread."""

    journal = None

    def __init__(self, engine: Engine) -> None:
        self.architecture = engine.runner.architecture
        self.capabilities = engine.runner.capabilities
        self.max_model_len = engine.limits.max_model_len
        self._loop = EngineLoop(engine, lambda news: self._subscribers.deliver(news), self._end)
        self._compiler: GrammarCompiler | None = None
        self._subscribers = Subscribers(engine.limits, self._post, self.abort)
        self._subscribers.stats = engine.stats()
        self._loop.start()

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """See EngineClient.use_grammars."""
        self._compiler = compiler

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See EngineClient.submit."""
        self._subscribers.submit(request, sink)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineClient.abort."""
        self._loop.post(Abort(request_id, choice))

    def stats(self) -> EngineStats:
        """See EngineClient.stats."""
        return self._subscribers.stats

    def close(self, timeout_s: float = 5.0) -> None:
        """See EngineClient.close. A step longer than ``timeout_s`` outlives the requests, which end then."""
        self._loop.post(Stop())
        self._loop.join(timeout_s)
        self._subscribers.end_all(CLOSED, finish_reason="abort")

    def _post(self, request: EngineRequest) -> None:
        self._loop.post(request, compiled(request, self._compiler))

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._subscribers.end_all(CLOSED, finish_reason="abort")
        else:
            why = f"The engine died: {type(error).__name__}: {error}"
            self._subscribers.end_all(why, finish_reason="error")
