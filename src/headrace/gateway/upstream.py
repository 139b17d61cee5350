"""Upstreams: endpoints with their keys, their health, and what they have in hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.gateway.config import GatewayConfig, Health, ServedModel, UpstreamConfig
from headrace.gateway.health import HealthState
from headrace.gateway.kinds import KINDS

if TYPE_CHECKING:
    import aiohttp

    from headrace.gateway.context import RequestContext


class Upstream:
    """One endpoint. ``outstanding_tokens``: of all requests that it works on, estimated."""

    def __init__(self, name: str, config: UpstreamConfig, health: Health) -> None:
        """Raises ConfigError if its API key is not in the environment."""
        self.name = name
        self.config = config
        self.kind = KINDS[config.kind]
        self.health = HealthState(health)
        self.in_flight = 0
        self.outstanding_tokens = 0
        self.chosen = 0
        self.drained = False  # by an operator: it gets nothing new
        key = config.secret(config.api_key_env)
        self._credential = config.secret(config.credential_env)
        self.headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key is not None:
            self.headers["authorization"] = f"Bearer {key}"

    def become(self, other: Upstream) -> None:
        """Take the settings of another one at the same address; what is in hand, and its health, stay."""
        self.config, self.headers, self._credential = other.config, other.headers, other._credential
        self.health.settings = other.health.settings

    def headers_for(self, context: RequestContext) -> dict[str, str]:
        """The headers of a request. A server of ours also learns whose it is: tenants share no prefix cache,
        and take turns.
        """
        headers = {**self.headers, "x-request-id": context.id}
        if self._credential is not None:
            headers["x-headrace-gateway"] = self._credential
            headers["x-headrace-tenant"] = headers["x-headrace-cache-salt"] = context.tenant
            headers["x-headrace-tenant-weight"] = f"{context.weight:g}"
            headers["x-headrace-priority"] = str(context.priority)
            left_s = max(context.deadline - time.monotonic(), 0.001)
            headers["x-headrace-timeout-s"] = f"{left_s:.3f}"
        return headers

    def begin(self, tokens: int) -> Work:
        """Count a request in; its :class:`Work` counts it out."""
        self.in_flight += 1
        self.outstanding_tokens += tokens
        self.chosen += 1
        return Work(self, tokens)

    def end(self, tokens: int) -> None:
        """Count a request out. For :class:`Work` only."""
        self.in_flight -= 1
        self.outstanding_tokens -= tokens

    def power(self) -> float:
        """Its weight as far as its health goes; an ejected one counts as one that has just come back."""
        return self.config.weight * max(self.health.share(), 0.1)

    async def probe(self, session: aiohttp.ClientSession) -> int:
        """The status with which it answers its kind's probe."""
        parts = urlsplit(self.config.url)
        path = self.kind.probe
        base = f"{parts.scheme}://{parts.netloc}" if path.startswith("/") else f"{self.config.url}/"
        async with session.get(base + path, headers=self.headers, allow_redirects=False) as answer:
            return answer.status


class Work:
    """A request in an upstream's hands. Ending it twice counts once."""

    def __init__(self, upstream: Upstream, tokens: int) -> None:
        self._upstream: Upstream | None = upstream
        self._tokens = tokens

    def end(self) -> None:
        """The upstream works on it no more."""
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.end(self._tokens)


@dataclass(frozen=True, slots=True)
class Target:
    """A model at an upstream. ``name``: what the upstream calls it."""

    upstream: Upstream
    name: str
    served: ServedModel


def targets_of(config: GatewayConfig, upstreams: dict[str, Upstream]) -> dict[str, tuple[Target, ...]]:
    """Where each model is served."""
    out: dict[str, tuple[Target, ...]] = {}
    for name, settings in config.upstreams.items():
        for model, served in settings.models.items():
            target = Target(upstreams[name], served.name or model, served)
            out[model] = (*out.get(model, ()), target)
    return out
