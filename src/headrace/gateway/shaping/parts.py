"""Stage 5: a document that is too long for one request is read in parts; then the request is their merge.

Each part is a request of the same tenant, for the same model, through the same caches and failover, in a row
of the ledger under the same id. They share the whole request's place and reservation.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from headrace.errors import HeadraceError, UpstreamError
from headrace.gateway import replay
from headrace.gateway.context import RequestContext
from headrace.gateway.decide import decide
from headrace.gateway.fetch import fetch
from headrace.gateway.parse import prompt_key
from headrace.gateway.settle import settle
from headrace.gateway.usage import prompt_estimate

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.shaping.documents import Split

_CACHE = "x-headrace-cache"
_PASSED_ON = ("x-session-id",)


async def read_parts(gateway: Gateway, context: RequestContext) -> None:
    """Fill in the body with what came of the parts.

    Raises HeadraceError that says which part failed, and why; the others are given up then.
    """
    split = context.split
    if split is None:
        return
    # from here on the request is the merge; the reservation holds for all
    context.prompt_tokens = split.merge_tokens
    context.output_tokens -= split.output_tokens
    await decide(gateway, context)  # once, so that one model reads all of it
    limit = asyncio.Semaphore(split.plan.parallel)
    tasks = [
        asyncio.create_task(_limited(limit, gateway, context, split, number))
        for number in range(1, len(split.bodies) + 1)
    ]
    try:
        notes = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    context.body["messages"] = split.merged(notes)
    context.prompt_tokens = prompt_estimate(context.body)
    context.prompt_key = prompt_key(context.body, "messages")


async def _limited(
    limit: asyncio.Semaphore, gateway: Gateway, context: RequestContext, split: Split, number: int
) -> str:
    async with limit:
        return await _read(gateway, context, split, number)


async def _read(gateway: Gateway, context: RequestContext, split: Split, number: int) -> str:
    """What is said about a part."""
    part = _part(context, split, number)
    context.reading.append(part)
    try:
        await fetch(gateway, part)
        part.outcome = "ok"
        assert isinstance(part.answer, bytes)
        text = replay.text_of(orjson.loads(part.answer))
        if text is None:
            part.outcome = "failed"
            raise UpstreamError("its answer has no text, or was cut off by the upstream")
        return text
    except asyncio.CancelledError:
        part.outcome = "cancelled"
        raise
    except HeadraceError as error:
        if part.outcome != "failed" or error.status < 500:
            part.outcome = "refused" if error.status < 500 else "failed"
        error.message = f"part {number} of {len(split.bodies)} of the document failed: {error.message}"
        raise
    finally:
        context.reading.remove(part)
        await settle(gateway, part)
        _log(gateway, part, len(split.bodies))


def _part(context: RequestContext, split: Split, number: int) -> RequestContext:
    """The request about a part."""
    headers = {name: context.headers[name] for name in _PASSED_ON if name in context.headers}
    wish = context.headers.get(_CACHE, "").strip().lower()
    if wish:  # parts are not answered by what only means the same
        headers[_CACHE] = "on" if wish == "semantic" else wish
    body = dict(split.bodies[number - 1])
    choice = context.choice
    return RequestContext(
        context.id,
        "chat/completions",
        headers,
        b"",
        context.deadline,
        tenant=context.tenant,
        key=context.key,
        app=context.app,
        weight=context.weight,
        scopes=context.scopes,
        body=body,
        model=context.model,
        choice=None if choice is None else replace(choice),
        candidates=context.candidates,
        release=context.release,
        version=context.version,
        priority=context.priority,
        prompt_tokens=split.part_tokens[number - 1],
        output_tokens=split.plan.part_output_tokens,
        prompt_key=prompt_key(body, "messages"),
        whole=context,
        part=number,
    )


def _log(gateway: Gateway, part: RequestContext, count: int) -> None:
    """Never its content."""
    usage = part.usage
    gateway.log.info(
        "document part",
        request_id=part.id,
        part=part.part,
        of=count,
        tenant=part.tenant,
        model=part.model,
        upstream=None if part.target is None else part.target.upstream.name,
        outcome=part.outcome,
        cache=part.cache,
        prompt_tokens=None if usage is None else usage.prompt,
        completion_tokens=None if usage is None else usage.completion,
        cost_usd=part.nano_usd / 1e9,
        duration_ms=round((time.monotonic() - part.began) * 1000),
    )
