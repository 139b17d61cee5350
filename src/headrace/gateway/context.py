"""One request on its way through the pipeline. Comments say which stage fills what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.gateway.ledger import CacheUse, Outcome
from headrace.gateway.usage import Usage

if TYPE_CHECKING:
    from headrace.gateway.quotas import Reservation, Scope
    from headrace.gateway.upstream import Target

Route = Literal["chat/completions", "completions", "embeddings"]


class Stream(Protocol):
    """Events for the client; closing it ends whatever makes them."""

    def __aiter__(self) -> AsyncGenerator[bytes]: ...

    async def aclose(self) -> None: ...


@dataclass(slots=True, eq=False)
class RequestContext:
    """What is known of a request."""

    # by the app, before the first stage
    id: str
    route: Route
    headers: Mapping[str, str]
    raw_body: bytes
    deadline: float  # of time.monotonic
    began: float = field(default_factory=time.monotonic)

    # authenticate
    tenant: str = ""
    key: str = ""
    app: str = ""
    weight: float = 1.0  # of the tenant
    scopes: tuple[Scope, ...] = ()  # whose limits hold: the tenant's, the app's, the key's

    # parse
    body: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # of an upstream's, aliases and releases resolved
    model_scopes: tuple[Scope, ...] = ()  # whose limits hold beside those: the model's
    candidates: tuple[Target, ...] = ()  # that have the model, and may serve the version
    release: str = ""  # that was asked for, if it was one
    version: str = ""  # of it
    trial: str = ""  # that the request is part of
    candidate: bool = False  # in it
    priority: int = 0  # lower is more urgent; no lower than the tenant may ask for
    stream: bool = False
    wants_usage: bool = False  # the client asked for the usage of its stream
    choices: int = 1  # that are asked for
    prompt_tokens: int = 0  # estimated
    output_tokens: int = 0  # at most, or the default where the request says nothing
    prompt_key: bytes = b""  # the prompt as bytes whose beginnings are equal where prompts begin alike

    # reserve, admit
    reservation: Reservation | None = None
    admitted: bool = False

    # cache
    cache: CacheUse = "off"
    fingerprint: bytes | None = None  # to be stored under
    recorded: bytes | None = None  # the upstream's answer, whole and good, for the cache

    # route
    targets: tuple[Target, ...] = ()

    # relay, or cache on a hit
    target: Target | None = None
    first_token_at: float | None = None  # of a stream, by time.monotonic
    patience: asyncio.Timeout | None = None  # with the upstream, while it is waited for
    usage: Usage | None = None
    answer: bytes | Stream | None = None

    # settle
    nano_usd: int = 0
    outcome: Outcome = "failed"
    settled: bool = False

    def cut_short(self) -> None:
        """The gateway ends: whatever is waited for counts as late, so that the client is told."""
        self.deadline = time.monotonic()
        if self.patience is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self.patience.reschedule(asyncio.get_running_loop().time())
