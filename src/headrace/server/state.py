"""What a server knows about itself: its settings, whether it serves, and how much it has in hand."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.errors import EngineDeadError, HeadraceError, ModelNotFoundError, OverloadedError
from headrace.observe.logs import logger
from headrace.observe.metrics import Metrics

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from headrace.frontend.frontend import Frontend
    from headrace.server.resumed import ResumedAnswers

Phase = Literal["loading", "ok", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and names of one server. ``served_model_names``: the first is the one that answers carry."""

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = None
    gateway_credential: str | None = None  # whoever sends it may say on whose behalf; see sender.py
    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 256  # prompts of one completion request
    max_inputs: int = 2048  # inputs of one embeddings request, as with OpenAI
    read_timeout_s: float = 60.0  # for a request's headers, and for its whole body
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is given up
    tool_call_parser: str | None = None  # a name in FORMATS of headrace.frontend.tools; None: by the template


class ServerState:
    """One server's life: loading, ok, draining (or failed), and the requests in hand."""

    def __init__(self, settings: ServerSettings, log: FilteringBoundLogger | None = None) -> None:
        self.settings = settings
        self.log: FilteringBoundLogger = log or logger()
        self.phase: Phase = "loading"
        self.started = int(time.time())
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._names = settings.served_model_names
        self._frontend: Frontend | None = None
        self.resumed: ResumedAnswers | None = None  # where requests are kept
        self._metrics: Metrics | None = None

    def ready(self, frontend: Frontend) -> None:
        """The model is loaded: serve it, and say how long that took from the opening of its files on."""
        self._names = self._names or (frontend.model_name,)
        self.metrics.watch(frontend.client.stats, time.monotonic() - frontend.opened_at)
        self._frontend = frontend
        if frontend.journal is not None:
            from headrace.server.resumed import ResumedAnswers  # it knows this class

            self.metrics.watch_journal(frontend.journal.stats)
            self.resumed = ResumedAnswers(self, frontend)
        if self.phase == "loading":
            self.phase = "ok"

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.phase = "draining"

    def note(self, error: HeadraceError) -> None:
        """Learn from an error that a request met: nothing can be served any more once the engine is dead."""
        if isinstance(error, EngineDeadError) and self.phase == "ok":
            self.phase = "failed"

    @property
    def metrics(self) -> Metrics:
        """This server's metrics, made when first needed: their label needs the model's name."""
        if self._metrics is None:
            self._metrics = Metrics(self._names[0] if self._names else "unknown")
        return self._metrics

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model is served; empty while loading without given names."""
        return self._names

    @property
    def frontend(self) -> Frontend:
        """The loaded frontend. Raises OverloadedError while loading or draining, EngineDeadError later."""
        if self.phase == "loading":
            raise OverloadedError("the model is still loading; try again in a moment")
        if self.phase == "draining":
            raise OverloadedError("the server is shutting down; try again elsewhere or later")
        if self._frontend is None or self.phase == "failed":
            raise EngineDeadError("the engine has stopped and this server can serve no more; restart it")
        return self._frontend

    @property
    def loaded(self) -> Frontend | None:
        """The frontend, whether or not new requests are taken; None before it is loaded."""
        return self._frontend

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless ``name`` is served here (None means: whatever is)."""
        if name is not None and name not in self._names:
            known = ", ".join(f"`{known}`" for known in self._names)
            raise ModelNotFoundError(
                f"the model `{name[:200]}` does not exist here; this server has {known}", param="model"
            )

    def enter(self) -> None:
        """A generation request is being worked on."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A generation request has ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no generation request is in hand."""
        await self._idle.wait()


def error_of_kind(kind: str | None, message: str | None) -> HeadraceError:
    """The exception that an output of the engine names, so that its status and code are right."""
    from headrace import errors

    found = getattr(errors, kind or "", None)
    if not (isinstance(found, type) and issubclass(found, HeadraceError)):
        found = errors.GenerationError
    return found(message or "generation failed")
