"""Stage 6: which upstreams can serve the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def route(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the targets: those whose context holds prompt and answer, else those with the longest one.

    The prompt's tokens are an estimate, rather too many, so that a context too short by it may do.
    """
    targets = context.candidates
    needed = context.prompt_tokens + context.output_tokens
    roomy = [target for target in targets if (target.served.context or needed) >= needed]
    if not roomy:
        longest = max(target.served.context or 0 for target in targets)
        roomy = [target for target in targets if target.served.context == longest]
    context.targets = tuple(roomy)
