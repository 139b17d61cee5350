"""The stages that get an answer: out of the caches, with an identical request, or from an upstream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace.gateway.cache import complete, look_up
from headrace.gateway.decide import decide
from headrace.gateway.relay import relay
from headrace.gateway.route import route

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def fetch(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the answer of a request that has its place. Raises HeadraceError."""
    await look_up(gateway, context)
    if context.answer is not None:
        return
    if context.flight is not None:
        await context.flight.lead(gateway, partial(_compute, gateway, context))
    else:
        await _compute(gateway, context)


async def _compute(gateway: Gateway, context: RequestContext) -> None:
    await decide(gateway, context)
    await route(gateway, context)
    batching = gateway.config.batching
    if batching is not None and gateway.batches.may_wait(context, batching):
        await gateway.batches.relay(context, batching)
    else:
        await relay(gateway, context)  # balance chooses for each of its attempts
    complete(context)
