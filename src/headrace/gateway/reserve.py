"""Stage 3: what the request may need is taken from the quotas of its tenant, app, key and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.gateway.usage import Usage, cost
from headrace.web.ids import unique_id

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def reserve(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the reservation. Raises LimitError, BudgetError, InvalidRequestError for what never fits, and
    StateError where nothing can be reserved, or what was used could not be kept.
    """
    scopes = (*context.scopes, *context.model_scopes)
    most = Usage(context.prompt_tokens, context.output_tokens)
    dearest = max(cost(target.served.price, most) for target in context.candidates)
    gateway.settlements.check()
    context.reservation = await gateway.quotas.reserve(unique_id("hold"), scopes, most.total, dearest)
