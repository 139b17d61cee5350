"""Intake: what an engine process does with its messages, so that grammars are compiled beside the engine."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from headrace.engine.grammar import GrammarCompiler, Vocabulary, compiled
from headrace.engine.loop import Abort, Command, EngineLoop
from headrace.engine.request import EngineRequest
from headrace.errors import HeadraceError

Message = Command | Vocabulary


class Intake:
    """Passes commands on to ``loop``; requests with a grammar take the way over a thread that compiles it.

    Commands of one request keep their order: an abort follows its request, whichever way that went.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._compiler: GrammarCompiler | None = None
        self._slow: SimpleQueue[Message] = SimpleQueue()
        self._compiling: set[str] = set()  # requests that have not reached the loop yet
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> None:
        """Handle one message. Always from the same thread."""
        slow = (
            isinstance(message, Vocabulary)
            or (isinstance(message, EngineRequest) and message.params.structured_outputs is not None)
            or (isinstance(message, Abort) and message.request_id in self._compiling)
        )
        if not slow:
            assert not isinstance(message, Vocabulary)
            self._loop.post(message)
            return
        if isinstance(message, EngineRequest):
            self._compiling.add(message.request_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="headrace-grammars", daemon=True)
            self._thread.start()
        self._slow.put(message)

    def _compile(self) -> None:
        while True:
            message = self._slow.get()
            if isinstance(message, Vocabulary):
                self._compiler = GrammarCompiler(message)
            elif isinstance(message, EngineRequest):
                try:
                    grammar = compiled(message, self._compiler)
                except HeadraceError as error:
                    self._loop.post(message, error)
                else:
                    self._loop.post(message, grammar)
                self._compiling.discard(message.request_id)  # from here on, aborts find it in the loop
            else:
                self._loop.post(message)
