"""Upstreams: endpoints with their keys, their health, what they can, and what they have in hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from headrace.errors import ConfigError
from headrace.gateway.config import IN_PROCESS, GatewayConfig, Health, ServedModel, UpstreamConfig
from headrace.gateway.connections import need_http
from headrace.gateway.health import HealthState
from headrace.gateway.kinds import kind_of
from headrace.gateway.told import MAX_BYTES, State, held_models, requests_of, state_of

if TYPE_CHECKING:
    from headrace.gateway.connections import Connections
    from headrace.gateway.context import RequestContext
    from headrace.gateway.kinds import Capability
    from headrace.gateway.local import LocalServer

_TYPICAL_TOKENS = 1000.0  # of a request, before there has been one
_SMOOTHING = 16  # requests


class Upstream:
    """One endpoint. ``outstanding_tokens``: of all requests that it works on, estimated."""

    def __init__(
        self, name: str, config: UpstreamConfig, health: Health, local: LocalServer | None = None
    ) -> None:
        """``local``: the server in this process, if there is one.

        Raises ConfigError if there is none and it should be that, its API key is not in the environment, or
        what connections take is not installed.
        """
        if config.url == IN_PROCESS and local is None:
            raise ConfigError(
                f"the upstream {name} is in-process: that is for `headrace serve MODEL --gateway`"
            )
        self.local = local if config.url == IN_PROCESS else None
        if self.local is None:
            need_http(name)
        self.name = name
        self.config = config
        self.kind = kind_of(config.kind)
        self.contexts: dict[str, int] = {}  # of its models, by its names, as far as it tells
        self.health = HealthState(health)
        self.in_flight = 0
        self.outstanding_tokens = 0
        self.chosen = 0
        self.drained = False  # by an operator: it gets nothing new
        self.state: State = "unknown"  # as its last probe told
        self.others = 0  # requests that it has in hand from elsewhere, as it told
        self._others_before = 0  # what the last look found
        self._held: frozenset[str] | None = None  # models in its memory, where it tells them
        self._mean_tokens = _TYPICAL_TOKENS
        self._each_s = 0.0  # of its time, what a request has had that was there from the beginning
        self._counted_at = time.monotonic()
        if self.local is None:
            key, self._credential = config.secret(config.api_key_env), config.secret(config.credential_env)
        else:
            key, self._credential = self.local.api_key, self.local.credential
        self.headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self.headers |= self.kind.headers(key)

    def become(self, other: Upstream) -> None:
        """Take the settings of another one at the same address; what is in hand, and its health, stay."""
        self.config, self.headers, self._credential = other.config, other.headers, other._credential
        self.kind = other.kind
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
        began = self.each_s()
        self.in_flight += 1
        self.outstanding_tokens += tokens
        self._mean_tokens += (tokens - self._mean_tokens) / _SMOOTHING
        self.chosen += 1
        return Work(self, tokens, began)

    def end(self, tokens: int) -> None:
        """Count a request out. For :class:`Work` only."""
        self.each_s()
        self.in_flight -= 1
        self.outstanding_tokens -= tokens

    def each_s(self) -> float:
        """Seconds of its time that each request has had: while it works on n of them, a second is a nth for
        each. What a request has had is the difference between its end and its beginning.
        """
        now = time.monotonic()
        if self.in_flight:
            self._each_s += (now - self._counted_at) / self.in_flight
        self._counted_at = now
        return self._each_s

    def power(self) -> float:
        """Its weight as far as its health goes; an ejected one counts as one that has just come back."""
        return self.config.weight * max(self.health.share(), 0.1)

    def busy_tokens(self) -> float:
        """Its work: ours, and that of others, whose requests count as ours do on average."""
        return self.outstanding_tokens + self.others * self._mean_tokens

    @property
    def away(self) -> bool:
        """Whether it says that it cannot answer now, through no fault."""
        return self.state in ("loading", "draining")

    def must_load(self, name: str) -> bool:
        """Whether its model ``name`` is not in its memory, as far as it tells."""
        return self._held is not None and name not in self._held

    async def probe(self, connections: Connections) -> State:
        """Ask its kind's probe how it is."""
        self.state = state_of(*await self._get(connections, self.kind.probe))
        return self.state

    async def look(self, connections: Connections) -> None:
        """Ask for its load and the models that it holds, where its kind tells them."""
        kind = self.kind
        if self.state != "loaded":
            self.forget()
            return
        if kind.gauges and self.local is None:  # in this process, nobody else asks
            before = self.in_flight
            status, page = await self._get(connections, "/metrics")
            told = requests_of(page, kind.gauges) if status == 200 else None
            found = max((told or 0) - max(before, self.in_flight), 0)
            # ours that came and went meanwhile look like others', but not twice
            self.others, self._others_before = min(found, self._others_before), found
        if kind.holds:
            status, page = await self._get(connections, kind.holds)
            self._held = held_models(page) if status == 200 else None

    def forget(self) -> None:
        """What it told of its load is old."""
        self.others, self._others_before, self._held = 0, 0, None

    async def _get(self, connections: Connections, path: str) -> tuple[int, bytes]:
        """Status and page. ``path``: below the host if it begins with a slash, else below the address."""
        parts = urlsplit(self.config.url)
        base = f"{parts.scheme}://{parts.netloc}" if path.startswith("/") else f"{self.config.url}/"
        asked = await (self.local or connections).get(base + path, headers=self.headers)
        async with asked as answer:
            page = b""
            while len(page) < MAX_BYTES and (part := await answer.content.readany()):
                page += part
            return answer.status, page

    async def learn(self, connections: Connections) -> None:
        """Ask how long its models' contexts are. What it does not tell stays unknown."""
        status, page = await self._get(connections, "models")
        try:
            if status != 200:
                raise ValueError(status)
            cards = orjson.loads(page)["data"]
            self.contexts = {card["id"]: length for card in cards if (length := _told_context(card))}
        except (ValueError, KeyError, TypeError, AttributeError):  # it is no list of models
            self.contexts = {}

    def context_of(self, name: str) -> int | None:
        """How long the context of its model ``name`` is, if it has told."""
        if self.kind.any_name and len(self.contexts) == 1:
            [only] = self.contexts.values()
            return only
        return self.contexts.get(name)


def _told_context(card: dict[str, Any]) -> int | None:
    """Of a model's card, as vLLM, SGLang and ours write it, or llama.cpp."""
    meta = card.get("meta")
    told = [card.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    return next((length for length in told if type(length) is int and length > 0), None)


class Work:
    """A request in an upstream's hands. Ending it twice counts once. ``began``: what ``each_s`` was then."""

    def __init__(self, upstream: Upstream, tokens: int, began: float) -> None:
        self._upstream: Upstream | None = upstream
        self._tokens = tokens
        self._began = began
        self._rate = upstream.config.usd_per_hour / 3600
        self._usd = 0.0

    def end(self) -> None:
        """The upstream works on it no more."""
        self._usd = self.usd
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.end(self._tokens)

    @property
    def usd(self) -> float:
        """Its share, so far, of what the upstream's hardware costs."""
        if self._upstream is None or not self._rate:
            return self._usd
        return (self._upstream.each_s() - self._began) * self._rate


@dataclass(frozen=True, slots=True)
class Target:
    """A model at an upstream. ``name``: what the upstream calls it."""

    upstream: Upstream
    name: str
    served: ServedModel

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer, as configured or as the upstream tells; None: it is not known."""
        return self.served.context or self.upstream.context_of(self.name)

    def can(self, needed: set[Capability], body: dict[str, Any]) -> bool:
        """Whether it has the capabilities, and honours what the request asks."""
        kind = self.upstream.kind
        return needed <= (self.served.serves or kind.serves) and kind.can(body)


def targets_of(config: GatewayConfig, upstreams: dict[str, Upstream]) -> dict[str, tuple[Target, ...]]:
    """Where each model is served."""
    out: dict[str, tuple[Target, ...]] = {}
    for name, settings in config.upstreams.items():
        for model, served in settings.models.items():
            target = Target(upstreams[name], served.name or model, served)
            out[model] = (*out.get(model, ()), target)
    return out
