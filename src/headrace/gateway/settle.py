"""Stage 10: what was used takes the place of what was reserved; ledger, cache and metrics learn it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.gateway.authenticate import OWN_TENANT
from headrace.gateway.cache import keep
from headrace.gateway.ledger import FREE, Entry
from headrace.gateway.settlements import Settlement
from headrace.gateway.usage import Usage, cost, nano

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def settle(gateway: Gateway, context: RequestContext) -> None:
    """Settle once, however often it is called. Only the store is waited for; what is cancelled meanwhile is
    written later (:mod:`headrace.gateway.settlements`).

    A request whose computation goes on for others is settled when that ends. A part of a document is settled
    with its request, which is told of it here.
    """
    if context.settled or context.handed_over:
        return
    context.settled = True
    try:
        if context.whole is not None:
            entry = _entry(gateway, context)
            context.nano_usd = entry.nano_usd
            context.whole.parts.append(entry)
            _count_tokens(gateway, entry)
        elif context.reservation is not None:
            await _record(gateway, context)
    finally:
        gateway.releases.note(context)
        if context.admitted:
            gateway.admissions.leave()
        keep(gateway, context)


async def _record(gateway: Gateway, context: RequestContext) -> None:
    assert context.reservation is not None
    entry = _entry(gateway, context)
    rows = [*context.parts, entry]
    tokens = sum(row.charged_tokens for row in rows)
    context.nano_usd = sum(row.nano_usd for row in rows)

    metrics = gateway.metrics
    metrics.requests.labels(context.tenant, context.model, context.outcome).inc()
    if context.release:
        metrics.release_requests.labels(context.release, context.version, context.outcome).inc()
    metrics.seconds.labels(context.model).observe(entry.duration_ms / 1000)
    metrics.cache.labels(context.cache).inc()
    _count_tokens(gateway, entry)
    if context.choice is not None and context.choice.model:
        name, judgement = context.choice.policy.name, context.choice.judgement
        metrics.routed.labels(name, entry.intent, context.choice.model, entry.reason).inc()
        if judgement is not None and judgement.seen == "features":
            metrics.no_embedding.labels(name).inc()
    await gateway.settlements.settle(Settlement(context.reservation, tokens, context.nano_usd, tuple(rows)))


def _count_tokens(gateway: Gateway, entry: Entry) -> None:
    metrics, names, free = gateway.metrics, (entry.tenant, entry.model), entry.cache in FREE
    metrics.tokens.labels(*names, "prompt").inc(0 if free else entry.prompt_tokens)
    metrics.tokens.labels(*names, "completion").inc(0 if free else entry.completion_tokens)
    metrics.cost.labels(*names).inc(entry.nano_usd / 1e9)
    metrics.baseline.labels(*names, "cache" if free else "upstream").inc(entry.baseline_nano_usd / 1e9)


def _entry(gateway: Gateway, context: RequestContext) -> Entry:
    """The request's row, or that of the part that it is."""
    usage = context.usage or Usage()
    charged = usage if context.cache not in FREE else Usage()
    hardware = nano(context.hardware_usd)
    return Entry(
        ended_at=time.time(),
        request=context.id,
        tenant=context.tenant,
        key=context.key,
        model=context.model,
        upstream=context.target.upstream.name if context.target is not None else "",
        route=context.route,
        outcome=context.outcome,
        cache=context.cache,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=usage.completion,
        estimated=usage.estimated,
        nano_usd=(0 if context.target is None else cost(context.target.served.price, charged)) + hardware,
        resumed=context.resumed or "",
        duration_ms=round((time.monotonic() - context.began) * 1000),
        app=context.app,
        release=context.release,
        version=context.version,
        baseline_nano_usd=_baseline(gateway, context, usage, hardware),
        part=context.part,
        **_routed(context),
    )


def _baseline(gateway: Gateway, context: RequestContext, usage: Usage, hardware: int) -> int:
    """In 1e-9 dollars: by the large model where a route was asked for, else by who was asked. Time on
    hardware counts as it was: how long another one would have taken nobody knows.
    """
    if context.tenant == OWN_TENANT:
        return 0
    if context.choice is not None:
        prices = gateway.prices(context.choice.policy.large)
    else:
        targets = context.candidates if context.target is None else (context.target,)
        prices = [target.served.price for target in targets]
    return min((cost(price, usage) for price in prices), default=0) + hardware


def _routed(context: RequestContext) -> dict[str, Any]:
    """The ledger's columns about a route's choice."""
    if context.choice is None:
        return {}
    judgement = context.choice.judgement
    return {
        "routed": context.choice.policy.name,
        "intent": "" if judgement is None else judgement.intent,
        "confidence": None if judgement is None else judgement.confidence,
        "reason": context.choice.reason or "",
    }
