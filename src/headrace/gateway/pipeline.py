"""The way of a request, stage by stage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.gateway.admit import admit
from headrace.gateway.authenticate import authenticate
from headrace.gateway.fetch import fetch
from headrace.gateway.parse import parse
from headrace.gateway.reserve import reserve
from headrace.gateway.settle import settle
from headrace.gateway.shaping.parts import read_parts

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway


async def answer(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the answer. :func:`finish` must follow, whatever happens. Raises HeadraceError."""
    try:
        await authenticate(gateway, context)
        await parse(gateway, context)
        await reserve(gateway, context)
        await admit(gateway, context)
        await read_parts(gateway, context)  # of a document that is too long for one request
        await fetch(gateway, context)
        if isinstance(context.answer, bytes):  # of a stream, only its end tells
            context.outcome = "ok"
            await settle(gateway, context)
    except asyncio.CancelledError:
        context.outcome = "cancelled"
        raise
    except HeadraceError as error:
        context.outcome = "refused" if error.status < 500 else "failed"
        raise


async def finish(gateway: Gateway, context: RequestContext) -> None:
    """End what the request has begun, and settle it; neither, while it goes on for others."""
    if context.handed_over:
        return
    try:
        if context.answer is not None and not isinstance(context.answer, bytes):
            await context.answer.aclose()
    finally:
        await settle(gateway, context)
