"""Stage 10: what was used takes the place of what was reserved; ledger, cache and metrics learn it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.gateway.authenticate import OWN_TENANT
from headrace.gateway.cache import keep
from headrace.gateway.ledger import FREE, Entry
from headrace.gateway.settlements import Settlement
from headrace.gateway.usage import Usage, cost

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def settle(gateway: Gateway, context: RequestContext) -> None:
    """Settle once, however often it is called. Only the store is waited for; what is cancelled meanwhile is
    written later (:mod:`headrace.gateway.settlements`).
    """
    if context.settled:
        return
    context.settled = True
    try:
        if context.reservation is not None:
            await _record(gateway, context)
    finally:
        gateway.releases.note(context)
        if context.admitted:
            gateway.admissions.leave()
        keep(gateway, context)


async def _record(gateway: Gateway, context: RequestContext) -> None:
    assert context.reservation is not None
    usage = context.usage or Usage()
    charged = usage if context.cache not in FREE else Usage()
    if context.target is not None:
        context.nano_usd = cost(context.target.served.price, charged)
    entry = Entry(
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
        nano_usd=context.nano_usd,
        resumed=context.resumed or "",
        duration_ms=round((time.monotonic() - context.began) * 1000),
        app=context.app,
        release=context.release,
        version=context.version,
        baseline_nano_usd=_baseline(gateway, context, usage),
        **_routed(context),
    )
    _count(gateway, context, entry, charged)
    await gateway.settlements.settle(
        Settlement(context.reservation, charged.total, context.nano_usd, (entry,))
    )


def _count(gateway: Gateway, context: RequestContext, entry: Entry, charged: Usage) -> None:
    metrics, names = gateway.metrics, (context.tenant, context.model)
    metrics.requests.labels(*names, context.outcome).inc()
    if context.release:
        metrics.release_requests.labels(context.release, context.version, context.outcome).inc()
    metrics.seconds.labels(context.model).observe(entry.duration_ms / 1000)
    metrics.cache.labels(context.cache).inc()
    metrics.tokens.labels(*names, "prompt").inc(charged.prompt)
    metrics.tokens.labels(*names, "completion").inc(charged.completion)
    metrics.cost.labels(*names).inc(context.nano_usd / 1e9)
    answered = "cache" if context.cache in FREE else "upstream"
    metrics.baseline.labels(*names, answered).inc(entry.baseline_nano_usd / 1e9)
    if context.choice is not None and context.choice.model:
        name, judgement = context.choice.policy.name, context.choice.judgement
        metrics.routed.labels(name, entry.intent, context.choice.model, entry.reason).inc()
        if judgement is not None and judgement.seen == "features":
            metrics.no_embedding.labels(name).inc()


def _baseline(gateway: Gateway, context: RequestContext, usage: Usage) -> int:
    """In 1e-9 dollars: by the large model where a route was asked for, else by who was asked."""
    if context.tenant == OWN_TENANT:
        return 0
    if context.choice is not None:
        prices = gateway.prices(context.choice.policy.large)
    else:
        targets = context.candidates if context.target is None else (context.target,)
        prices = [target.served.price for target in targets]
    return min((cost(price, usage) for price in prices), default=0)


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
