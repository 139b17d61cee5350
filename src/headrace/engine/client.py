"""EngineClient: the only door to the engine. Requests in, outputs out, abort, stats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from headrace.engine.request import EngineOutput, EngineRequest, EngineStats

if TYPE_CHECKING:  # numpy with it, which a frontend does not wait for: its tokenizer loads meanwhile
    from headrace.backend.runner import Capabilities
    from headrace.engine.grammar import GrammarCompiler
    from headrace.engine.journal import Journal
    from headrace.model.architecture import Architecture

OutputSink = Callable[[list[EngineOutput]], None]
"""Receives every output of one step that belongs to its request; called on a thread of the client's."""


class EngineClient(Protocol):
    """Thread-safe. Implemented by ThreadClient (embedded) and ProcessClient (engine in its own process)."""

    architecture: Architecture
    capabilities: Capabilities
    max_model_len: int

    @property
    def journal(self) -> Journal | None:
        """Where requests that have a note are kept, if anywhere."""
        ...

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """Tell the engine the vocabulary, before the first request with ``structured_outputs``."""
        ...

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request. Raises InvalidRequestError, ContextLengthError, OverloadedError or EngineDeadError
        at once, in which case the sink is never called; otherwise each of its n sequences gets exactly one
        output with a finish_reason, whatever happens (abort, error, engine death included).
        A grammar that the compiler does not have cached yet is compiled on the caller's thread.
        """
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its sequences. Unknown and finished ones are ignored.

        The blocks are free within one step.
        """
        ...

    def stats(self) -> EngineStats:
        """A recent snapshot: at most a tenth of a second or a step old.

        A step in which a sequence has come, gone or begun to wait is in it.
        """
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Abort everything, stop the engine, free its memory. Closing twice is fine."""
        ...
