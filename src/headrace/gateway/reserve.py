"""Stage 3: what the request may need is taken from the quotas of its tenant, app, key and model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.gateway.usage import Usage, cost, nano
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target


async def reserve(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the reservation. Raises LimitError, BudgetError, InvalidRequestError for what never fits, and
    StateError where nothing can be reserved, or what was used could not be kept.
    """
    scopes = (*context.scopes, *context.model_scopes)
    most = Usage(context.prompt_tokens, context.output_tokens)
    dearest = max(
        cost(target.served.price, most) + _hardware(context, target) for target in context.candidates
    )
    gateway.settlements.check()
    context.reservation = await gateway.quotas.reserve(unique_id("hold"), scopes, most.total, dearest)


def _hardware(context: RequestContext, target: Target) -> int:
    """The most that its time on the hardware can cost, in 1e-9 dollars: all of that, to its deadline."""
    left_s = max(context.deadline - time.monotonic(), 0.0)
    at_once = 1 if context.split is None else context.split.plan.parallel
    return nano(target.upstream.config.usd_per_hour / 3600 * left_s * at_once)
