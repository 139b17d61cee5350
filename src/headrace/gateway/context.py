"""One request on its way through the pipeline. Comments say which stage fills what."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.gateway.ledger import CacheUse, Entry, Outcome
from headrace.gateway.usage import Usage

if TYPE_CHECKING:
    from headrace.gateway.intents.policy import Choice
    from headrace.gateway.quotas import Reservation, Scope
    from headrace.gateway.resume import How
    from headrace.gateway.semantic import Question
    from headrace.gateway.shaping.documents import Split
    from headrace.gateway.shaping.flights import Flight
    from headrace.gateway.upstream import Target, Work
    from headrace.gateway.vectors import Batch

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
    for_tenant: str = ""  # whose request it serves, where it is the gateway's own
    scopes: tuple[Scope, ...] = ()  # whose limits hold: the tenant's, the app's, the key's

    # parse
    body: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # of an upstream's, aliases and releases resolved; a route's name until that is decided
    choice: Choice | None = None  # where a route was asked for; decide makes it
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
    template: str = ""  # that the prompt was made of, as name@version
    prompt_tokens: int = 0  # estimated, or counted by the upstream's tokenizer
    prompt_ids: list[int] | None = None  # which that told, where the upstream is to be asked by them
    output_tokens: int = 0  # at most, or the default where the request says nothing
    split: Split | None = None  # of a document that is to be read in parts: both numbers are of all of it
    prompt_key: bytes = b""  # the prompt as bytes whose beginnings are equal where prompts begin alike

    # reserve, admit
    reservation: Reservation | None = None
    admitted: bool = False

    # cache
    cache: CacheUse = "off"
    similarity: float | None = None  # of the question whose answer this gets
    batch: Batch | None = None  # inputs of embeddings, and what is known of them
    question: Question | None = None  # to be kept for others that mean the same
    fingerprint: bytes | None = None  # to be stored under
    flight: Flight | None = None  # the computation that this request leads, and others may follow
    handed_over: bool = False  # its client has gone, and the computation goes on for others
    recorded: bytes | None = None  # the upstream's answer, whole and good, for the cache

    # route
    targets: tuple[Target, ...] = ()

    # relay, or cache on a hit
    target: Target | None = None
    attempts: int = 0  # upstreams that were asked
    works: list[Work] = field(default_factory=list)  # which those had of it, one after the other
    shared_usd: float = 0.0  # its share of the hardware in a batch
    resumed: How | None = None  # how its stream went on elsewhere, if it did
    first_token_at: float | None = None  # of a stream, by time.monotonic
    patience: asyncio.Timeout | None = None  # with the upstream, while it is waited for
    usage: Usage | None = None
    answer: bytes | Stream | None = None

    # read_parts, of a document
    whole: RequestContext | None = None  # the request that this one is a part of
    part: int = 0  # which
    reading: list[RequestContext] = field(default_factory=list)  # parts under way
    parts: list[Entry] = field(default_factory=list)  # what those of this request used, as they end

    # settle
    nano_usd: int = 0
    outcome: Outcome = "failed"
    settled: bool = False

    @property
    def hardware_usd(self) -> float:
        """What it has cost so far by its time on the upstreams' hardware."""
        return self.shared_usd + sum(work.usd for work in self.works)

    def note_resumed(self, how: How) -> None:
        """Its stream went on elsewhere; of several ways, the least exact one is kept."""
        if self.resumed != "text":
            self.resumed = how

    def cut_short(self) -> None:
        """The gateway ends: whatever is waited for counts as late, so that the client is told."""
        self.deadline = time.monotonic()
        for part in self.reading:
            part.cut_short()
        if self.patience is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self.patience.reschedule(asyncio.get_running_loop().time())
