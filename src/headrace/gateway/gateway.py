"""What all requests share: configuration, upstreams, and the state behind each stage."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING, Literal

from headrace.gateway.admit import Admissions
from headrace.gateway.balance import Affinity
from headrace.gateway.cache import AnswerCache
from headrace.gateway.config import GatewayConfig, Price
from headrace.gateway.embedder import Embedder
from headrace.gateway.health import keep_probing
from headrace.gateway.intents.policy import policies
from headrace.gateway.keys import Keys
from headrace.gateway.metrics import Metrics
from headrace.gateway.quotas import LEASE_S, Quotas
from headrace.gateway.relay import RetryBudget
from headrace.gateway.releases.controller import Releases
from headrace.gateway.store import Store
from headrace.gateway.upstream import Target, Upstream, targets_of
from headrace.observe.logs import logger

if TYPE_CHECKING:
    import aiohttp
    from structlog.typing import FilteringBoundLogger

    from headrace.gateway.context import RequestContext

_KEEP_ALIVE_S = 4.0  # shorter than the 5 s after which uvicorn, and so vLLM, closes idle connections

Phase = Literal["ok", "draining"]


class Gateway:
    """One gateway. ``async with`` opens its connections and starts what runs beside requests."""

    def __init__(self, config: GatewayConfig, log: FilteringBoundLogger | None = None) -> None:
        """Raises ConfigError for state that cannot be used and API keys missing in the environment."""
        self.config = config
        self.log: FilteringBoundLogger = log or logger()
        self.phase: Phase = "ok"
        self.upstreams = {
            name: Upstream(name, settings, config.health) for name, settings in config.upstreams.items()
        }
        self.targets: dict[str, tuple[Target, ...]] = targets_of(config, self.upstreams)
        self.store = Store(config.state)
        self.keys = Keys(self.store)
        self.quotas = Quotas(self.store)
        self.cache = AnswerCache(config.state, config.cache) if config.cache.enabled else None
        self.embedder = Embedder(self, config.embeddings) if config.embeddings is not None else None
        self.routes = policies(config)
        self.live: set[RequestContext] = set()
        self.admissions = Admissions(config.admission)
        self.affinity = Affinity()
        self.retry_budget = RetryBudget(config.retries.budget)
        self.metrics = Metrics(self.upstreams.values(), self.admissions)
        self.releases = Releases(self.store, config.releases, self.metrics, self.log)
        self._session: aiohttp.ClientSession | None = None
        self._beside: list[asyncio.Task[None]] = []

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pool of connections to upstreams."""
        assert self._session is not None, "the gateway is not open"
        return self._session

    async def __aenter__(self) -> Gateway:
        import aiohttp

        most = max(upstream.config.max_connections for upstream in self.upstreams.values())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=most, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            read_bufsize=2**18,
        )
        self._beside = [
            asyncio.create_task(work) for work in (self._renew_leases(), self.releases.keep_deciding())
        ]
        self._beside += [asyncio.create_task(keep_probing(self, up)) for up in self.upstreams.values()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        if self.embedder is not None:
            await self.embedder.aclose()
        await self.session.close()
        if self.cache is not None:
            self.cache.close()
        self.store.close()

    def targets_behind(self, name: str) -> tuple[Target, ...]:
        """Where a model is served, or any version of a release."""
        if name not in self.config.releases:
            return self.targets[name]
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
            with contextlib.suppress(sqlite3.Error):  # the next time is in time still
                self.quotas.renew()
