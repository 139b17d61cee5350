"""One attempt at one upstream: a whole answer, or a stream whose first event is here."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import orjson

from headrace.gateway.ask import AttemptError, ask, read_body
from headrace.gateway.kinds import told_error
from headrace.gateway.resume import first_asked
from headrace.gateway.stream import RelayedStream
from headrace.gateway.usage import Usage, prompt_estimate, told

if TYPE_CHECKING:
    import aiohttp

    from headrace.gateway.context import RequestContext
    from headrace.gateway.gateway import Gateway
    from headrace.gateway.upstream import Target, Work

_MAX_ANSWER_BYTES = 64 * 2**20


async def attempt(gateway: Gateway, context: RequestContext, target: Target, work: Work) -> None:
    """Fill in the answer, and the usage if it is whole; a stream's comes when it ends, and ends ``work``.

    Raises AttemptError, or a HeadraceError that says what is wrong with the request.
    """
    stream = RelayedStream(gateway, context, target, work) if context.stream else None
    kind = target.upstream.kind
    asked = first_asked(kind, context, None if stream is None else stream.progress)
    if context.prompt_ids is not None and kind.tokenizes:
        asked = {**asked, "prompt": context.prompt_ids}
    body = kind.body(asked, target.name, context.route, most=context.output_tokens)
    await ask(gateway, context, target, body, partial(_read, gateway, context, target, stream))


async def _read(
    gateway: Gateway,
    context: RequestContext,
    target: Target,
    stream: RelayedStream | None,
    response: aiohttp.ClientResponse,
) -> None:
    gateway.metrics.first_byte.labels(context.model).observe(time.monotonic() - context.began)
    if stream is None:
        context.answer = await _whole(context, target, response)
        return
    await stream.begin(response)
    context.answer = stream


async def _whole(context: RequestContext, target: Target, response: aiohttp.ClientResponse) -> bytes:
    body = await read_body(response, _MAX_ANSWER_BYTES)
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise AttemptError("garbage", "the answer is not JSON") from None
    if (translated := target.upstream.kind.answer(answer)) is not answer:
        answer, body = translated, orjson.dumps(translated)
    part = "data" if context.route == "embeddings" else "choices"
    if not isinstance(answer, dict) or not isinstance(answer.get(part), list) or not answer[part]:
        error = told_error(body)
        raise AttemptError("garbage", error[0] if error else f"the answer has no {part}")
    context.usage = told(answer.get("usage")) or Usage(
        context.prompt_tokens, prompt_estimate({"input": answer.get("choices")}), estimated=True
    )
    if context.fingerprint is not None:
        context.recorded = body
    return body
