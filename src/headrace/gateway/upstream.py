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

if TYPE_CHECKING:
    from headrace.gateway.connections import Connections
    from headrace.gateway.context import RequestContext
    from headrace.gateway.kinds import Capability
    from headrace.gateway.local import LocalServer

_MAX_MODELS_BYTES = 2**20


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

    async def probe(self, connections: Connections) -> int:
        """The status with which it answers its kind's probe."""
        parts = urlsplit(self.config.url)
        path = self.kind.probe
        base = f"{parts.scheme}://{parts.netloc}" if path.startswith("/") else f"{self.config.url}/"
        asked = await (self.local or connections).get(base + path, headers=self.headers)
        async with asked as answer:
            return answer.status

    async def learn(self, connections: Connections) -> None:
        """Ask how long its models' contexts are. What it does not tell stays unknown."""
        url = f"{self.config.url}/models"
        asked = await (self.local or connections).get(url, headers=self.headers)
        async with asked as answer:
            page = await answer.content.read(_MAX_MODELS_BYTES) if answer.status == 200 else b""
        try:
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
