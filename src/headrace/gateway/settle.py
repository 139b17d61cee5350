"""Stage 9: what was used takes the place of what was reserved; the ledger, the cache and metrics learn it."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING

from headrace.gateway.ledger import Entry, append
from headrace.gateway.usage import Usage, cost

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def settle(gateway: Gateway, context: RequestContext) -> None:
    """Settle once, however often it is called. Nothing in here waits: cancellation cannot cut it in two."""
    if context.settled:
        return
    context.settled = True
    try:
        if context.reservation is not None:
            _record(gateway, context)
    except sqlite3.Error as error:
        gateway.log.error("settlement failed", request_id=context.id, error=str(error))
    finally:
        gateway.releases.note(context)
        if context.admitted:
            gateway.admissions.leave()
        if gateway.cache is not None and context.fingerprint is not None:
            gateway.cache.land(context.fingerprint, context.recorded if context.outcome == "ok" else None)


def _record(gateway: Gateway, context: RequestContext) -> None:
    assert context.reservation is not None
    usage = context.usage or Usage()
    charged = usage if context.cache != "hit" else Usage()  # hits cost nothing
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
        duration_ms=round((time.monotonic() - context.began) * 1000),
        app=context.app,
        release=context.release,
        version=context.version,
    )
    gateway.quotas.settle(context.reservation, charged.total, context.nano_usd, lambda db: append(db, entry))
    metrics, names = gateway.metrics, (context.tenant, context.model)
    metrics.requests.labels(*names, context.outcome).inc()
    if context.release:
        metrics.release_requests.labels(context.release, context.version, context.outcome).inc()
    metrics.seconds.labels(context.model).observe(entry.duration_ms / 1000)
    metrics.cache.labels(context.cache).inc()
    metrics.tokens.labels(*names, "prompt").inc(charged.prompt)
    metrics.tokens.labels(*names, "completion").inc(charged.completion)
    metrics.cost.labels(*names).inc(context.nano_usd / 1e9)
