"""What all requests share: configuration, upstreams, and the state behind each stage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError, StateError
from headrace.gateway.admit import Admissions
from headrace.gateway.balance import Affinity
from headrace.gateway.config import GatewayConfig, Price
from headrace.gateway.connections import Connections
from headrace.gateway.health import keep_probing
from headrace.gateway.intents.policy import policies
from headrace.gateway.keys import Keys
from headrace.gateway.metrics import Metrics
from headrace.gateway.quotas import LEASE_S, Quotas
from headrace.gateway.relay import RetryBudget
from headrace.gateway.releases.controller import Releases
from headrace.gateway.settlements import Settlements
from headrace.gateway.shaping.flights import Flights
from headrace.gateway.shaping.gather import Batches
from headrace.gateway.shaping.templates import Templates
from headrace.gateway.shaping.tokens import TokenCounts
from headrace.gateway.store import store_of
from headrace.gateway.upstream import Target, Upstream, targets_of
from headrace.observe.logs import logger

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from headrace.gateway.answers import AnswerCache
    from headrace.gateway.context import RequestContext
    from headrace.gateway.embedder import Embedder
    from headrace.gateway.local import LocalServer
    from headrace.gateway.semantic import SemanticCache

_LOOK_S = 0.5

Phase = Literal["ok", "draining"]


class Gateway:
    """One gateway. ``async with`` opens its connections and starts what runs beside requests."""

    def __init__(
        self,
        config: GatewayConfig,
        log: FilteringBoundLogger | None = None,
        path: Path | None = None,
        local: LocalServer | None = None,
    ) -> None:
        """``path``: the file that ``config`` was read from, for it to be read again. ``local``: the server in
        this process.

        Raises ConfigError for caches that cannot be used and secrets missing in the environment.
        """
        if not config.upstreams:
            raise ConfigError(
                "`upstreams` are missing: only `headrace serve MODEL --gateway FILE` needs none"
            )
        self.config = config
        self.path = path
        self.local = local
        self.log: FilteringBoundLogger = log or logger()
        self.phase: Phase = "ok"
        self.reloading = asyncio.Lock()
        self.upstreams = {
            name: Upstream(name, settings, config.health, local)
            for name, settings in config.upstreams.items()
        }
        self._leaving: list[Upstream] = []  # removed from the configuration, with requests in hand
        self.targets: dict[str, tuple[Target, ...]] = targets_of(config, self.upstreams)
        self.store = store_of(config)
        self.keys = Keys(self.store)
        self.quotas = Quotas(self.store)
        self.settlements = Settlements(self.quotas, self.log)
        self.cache = _cache(config)
        self.templates = Templates(self.store)
        self.flights = Flights()
        self.batches = Batches(self)
        self.token_counts = TokenCounts(self)
        self.routes = policies(config)
        self.live: set[RequestContext] = set()
        self.admissions = Admissions(config.admission)
        self.affinity = Affinity()
        self.retry_budget = RetryBudget(config.retries.budget)
        self.metrics = Metrics(self._all_upstreams, self.admissions, self.settlements)
        self.releases = Releases(self.store, self.metrics, self.log)
        self.embedder, self.semantic = self._embedding(config)
        self.connections = Connections(_most_connections(self.upstreams))
        self._opened = False
        self._beside: set[asyncio.Task[None]] = set()
        self._probing: dict[Upstream, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Gateway:
        """Raises ConfigError for state that cannot be used, or does not go with the configured releases."""
        try:
            await self.store.open()
            self.releases.configure(self.config.releases, await self.releases.read(self.config.releases))
            await self.templates.declare(self.config)
        except BaseException:
            await self._close_state()
            raise
        self._opened = True
        for work in (
            self._renew_leases(),
            self.releases.keep_deciding(),
            self.settlements.keep_trying(),
        ):
            self._beside.add(asyncio.create_task(work))
        self._probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._beside, *self._probing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.flights.aclose()
        await self.batches.aclose()
        await _close(self.semantic, self.embedder)
        await self.connections.aclose()
        if self.local is not None:
            await self.local.aclose()
        await self.settlements.aclose()
        await self._close_state()

    async def _close_state(self) -> None:
        if self.cache is not None:
            self.cache.close()
        await self.store.aclose()

    async def reload(self, config: GatewayConfig) -> None:
        """Go by another configuration from the next request on. Those under way end as they began.

        Raises ConfigError, and stays as it was, if something in it needs a restart, an API key is missing, or
        it lacks a version that a release needs, or a classifier that can be read; StateError if the store
        cannot be asked for that.
        """
        if not config.upstreams:
            raise ConfigError("`upstreams` are missing: name one at least")
        for name in ("state", "store", "store_password_env", "host", "port", "admin"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"`{name}` cannot change while the gateway runs: restart it for that")
        if config.cache.enabled != self.config.cache.enabled:
            raise ConfigError("`cache.enabled` cannot change while the gateway runs: restart it for that")
        found = await self.releases.read(config.releases)
        routes = policies(config)
        fresh = {name: Upstream(name, at, config.health, self.local) for name, at in config.upstreams.items()}
        old, new = (self.embedder, self.semantic), (self.embedder, self.semantic)
        if (config.embeddings, config.cache) != (self.config.embeddings, self.config.cache):
            new = self._embedding(config)
        await self.templates.declare(config)
        # from here on nothing can fail, or is waited for: requests see one configuration or the other
        self.releases.configure(config.releases, found)
        self.routes = routes
        before, grows = self.upstreams, _most_connections(fresh) > _most_connections(self.upstreams)
        self.upstreams = {name: _successor(before.get(name), new) for name, new in fresh.items()}
        self._leaving += [old for old in before.values() if old not in self.upstreams.values()]
        self.targets = targets_of(config, self.upstreams)
        self.config = config
        self.admissions.configure(config.admission)
        self.retry_budget.share = config.retries.budget
        if self.cache is not None:
            self.cache.configure(config.cache)
        self.embedder, self.semantic = new
        if old != new:
            self._beside.add(asyncio.create_task(_close(old[1], old[0])))
        if self._opened:
            self._probe()
            if grows:
                closing = asyncio.create_task(self._close_when_unused(self.connections))
                self._beside.add(closing)
                closing.add_done_callback(self._beside.discard)
                self.connections = Connections(_most_connections(self.upstreams))

    async def _close_when_unused(self, connections: Connections) -> None:
        users = set(self.live)
        try:
            while users & self.live:
                await asyncio.sleep(_LOOK_S)
        finally:
            await connections.aclose()

    def _probe(self) -> None:
        """Have one task for each upstream that asks whether it lives."""
        for upstream in self._probing.keys() - set(self.upstreams.values()):
            self._probing.pop(upstream).cancel()
        for upstream in self.upstreams.values():
            if upstream not in self._probing:
                self._probing[upstream] = asyncio.create_task(keep_probing(self, upstream))

    def _all_upstreams(self) -> list[Upstream]:
        self._leaving = [upstream for upstream in self._leaving if upstream.in_flight]
        return [*self.upstreams.values(), *self._leaving]

    def _embedding(self, config: GatewayConfig) -> tuple[Embedder | None, SemanticCache | None]:
        """What works with embeddings of the gateway's own. Raises ConfigError if usearch is missing."""
        if config.embeddings is None:
            return None, None
        from headrace.gateway.embedder import Embedder

        embedder = Embedder(self, config.embeddings)
        if self.cache is None or config.cache.semantic is None:
            return embedder, None
        from headrace.gateway.semantic import SemanticCache

        return embedder, SemanticCache(self.cache, embedder, config.cache.semantic, self.metrics, self.log)

    def targets_behind(self, name: str) -> tuple[Target, ...]:
        """Where a model is served, or any version of a release; nowhere once the configuration lacks it."""
        if name not in self.config.releases:
            return self.targets.get(name, ())
        versions = self.config.releases[name].versions.values()
        found = [
            target
            for version in versions
            for target in self.targets[version.model]
            if version.upstreams is None or target.upstream.name in version.upstreams
        ]
        return tuple(dict.fromkeys(found))

    def prices(self, name: str) -> list[Price]:
        """Of a model, or of a release's stable version."""
        version = self.releases[name][1].stable if name in self.releases else None
        return self.config.prices(name, version)

    def failed(self, target: Target, reason: str, *, passing: bool = False) -> None:
        """An attempt failed. ``passing``: through no defect of the upstream's: its health does not suffer."""
        upstream = target.upstream
        self.metrics.failures.labels(upstream.name, reason).inc()
        before = upstream.health.share()
        if not passing:
            upstream.health.failed()
        if before and not upstream.health.share():
            self.log.warning("upstream ejected", upstream=upstream.name, reason=reason)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with contextlib.suppress(StateError):  # the next time is in time still
                await self.quotas.renew()


def _cache(config: GatewayConfig) -> AnswerCache | None:
    """Raises ConfigError if it cannot be used."""
    if not config.cache.enabled:
        return None
    from headrace.gateway.answers import AnswerCache

    return AnswerCache(config.state, config.cache)


def _most_connections(upstreams: Mapping[str, Upstream]) -> int:
    return max(upstream.config.max_connections for upstream in upstreams.values())


async def _close(semantic: SemanticCache | None, embedder: Embedder | None) -> None:
    if semantic is not None:
        await semantic.aclose()
    if embedder is not None:
        await embedder.aclose()


def _successor(old: Upstream | None, new: Upstream) -> Upstream:
    """``old`` with the settings of ``new`` if it is the same endpoint: its health and work stay known."""
    if old is None or (old.config.url, old.config.kind) != (new.config.url, new.config.kind):
        return new
    old.become(new)
    return old
