"""Stage 5: the caches. A request that was asked before, or means what one meant, gets that one's answer.

First the exact cache: the same request of the same tenant. Then, where it is wanted, the semantic one
(:mod:`headrace.gateway.semantic`). Embeddings are looked up input by input (:mod:`headrace.gateway.vectors`).
Identical requests at the same time are asked once: the others follow that one
(:mod:`headrace.gateway.shaping.flights`).
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import orjson

from headrace.errors import InvalidRequestError, UpstreamError
from headrace.gateway import replay, vectors
from headrace.gateway.config import CacheSettings
from headrace.gateway.sse import DONE, EventFilter
from headrace.gateway.usage import Usage, told

if TYPE_CHECKING:
    from headrace.gateway.answers import AnswerCache
    from headrace.gateway.context import RequestContext, Stream
    from headrace.gateway.gateway import Gateway

HEADER = "x-headrace-cache"
SIMILARITY_HEADER = "x-headrace-cache-similarity"
_WISHES = ("on", "off", "exact", "semantic", "refresh")


async def look_up(gateway: Gateway, context: RequestContext) -> None:
    """Fill in answer and usage on a hit; else what the answer is to be stored under, if it may be kept.

    Raises InvalidRequestError for a wish that there is not.
    """
    cache, wish = gateway.cache, _wish(context)
    if cache is None or not _may_keep(context, cache.settings, wish):
        return
    version = _version(context)
    fingerprint = _fingerprint(context, version)
    context.cache = "miss"
    if context.route == "embeddings":
        context.batch = vectors.batch_of(context, version)
    semantic = gateway.semantic
    if wish != "refresh":
        if _answered(cache, context, fingerprint):
            return
        if semantic is not None and semantic.wants(context, wish):
            context.question = await semantic.look_up(context, version)
            if _answered_by_meaning(context) or _answered(cache, context, fingerprint):
                return
        if (flight := gateway.flights.find(fingerprint, stream=context.stream)) is not None:
            # Where that one failed, to queue up behind the next would be slower for all.
            if not _followed(context, await flight.follow(context)):
                context.question = None
            return
        context.flight = gateway.flights.open(context, fingerprint)
    context.fingerprint = fingerprint
    if context.batch is not None and context.batch.kept:
        vectors.narrow(context, context.batch)
        context.cache = "partial-hit"


def complete(context: RequestContext) -> None:
    """Put what was known of a batch of embeddings, and what the upstream answered, together.

    Raises UpstreamError if the answer does not fit.
    """
    batch = context.batch
    if context.cache != "partial-hit" or batch is None or not isinstance(context.answer, bytes):
        return
    try:
        batch.take(context.answer, vectors.inputs_of(context.body))
    except ValueError as error:
        raise UpstreamError(str(error)) from None
    context.answer, _ = vectors.answer_of(context, batch)


def keep(gateway: Gateway, context: RequestContext) -> None:
    """The request is over: keep its answer, if it is a good one; nobody follows it any more. Never waits."""
    cache, fingerprint = gateway.cache, context.fingerprint
    if cache is None or fingerprint is None:
        return
    try:
        if context.recorded is not None and context.outcome == "ok":
            with contextlib.suppress(
                sqlite3.Error, ValueError
            ):  # a full disk, say: the answer itself is good
                _store(gateway, cache, context, fingerprint, context.recorded)
    finally:
        if context.flight is not None:
            gateway.flights.land(context.flight)


def _store(
    gateway: Gateway, cache: AnswerCache, context: RequestContext, fingerprint: bytes, record: bytes
) -> None:
    owner = (context.tenant, context.model)
    batch = context.batch
    if batch is not None:
        if not batch.fresh:
            batch.take(record, vectors.inputs_of(context.body))
        cache.put_all(batch.fresh, "embedding", *owner)
        return
    answer = replay.whole(record)
    if context.route != "embeddings" and not replay.ended_well(answer):
        return
    cache.put(fingerprint, record, "embedding" if context.route == "embeddings" else "answer", *owner)
    if gateway.semantic is not None and context.question is not None:
        gateway.semantic.learn(context.question, fingerprint, answer)


def _answered(cache: AnswerCache, context: RequestContext, fingerprint: bytes) -> bool:
    """Fill in what the exact cache has."""
    batch = context.batch
    if batch is not None:
        batch.kept |= cache.get_all(list(dict.fromkeys(batch.keys)))
        if not batch.complete:
            return False
        context.answer, context.usage = vectors.answer_of(context, batch)
    else:
        record = cache.get(fingerprint)
        if record is None or not _replay(context, record):
            return False
    context.cache = "hit"
    context.outcome = "ok"
    return True


def _followed(context: RequestContext, answer: bytes | Stream | None) -> bool:
    """Fill in what an identical request got; False if it got nothing that this one can have."""
    if isinstance(answer, bytes):
        if not _replay(context, answer):
            return False
        context.outcome = "ok"
    elif answer is None:
        return False
    else:
        context.answer = answer  # its end tells usage and outcome
    context.cache = "merged"
    return True


def _answered_by_meaning(context: RequestContext) -> bool:
    question = context.question
    if question is None or not question.served or question.nearest is None:
        return False
    if not _replay(context, question.nearest.answer):
        return False
    context.cache = "semantic-hit"
    context.similarity = question.nearest.similarity
    context.outcome = "ok"
    return True


def _replay(context: RequestContext, record: bytes) -> bool:
    """Fill in answer and usage from a kept answer; False if it cannot be had in the form that is asked."""
    try:
        if context.stream:
            record = record if replay.is_stream(record) else replay.events(replay.whole(record))
            replayed = ReplayedStream(record, wants_usage=context.wants_usage)
            context.answer, context.usage = replayed, replayed.usage
        else:
            answer = replay.whole(record)
            context.answer = orjson.dumps(answer) if replay.is_stream(record) else record
            context.usage = told(answer.get("usage")) or Usage(context.prompt_tokens, estimated=True)
    except ValueError:
        return False
    return True


class ReplayedStream:
    """A stream out of the cache, in one piece."""

    def __init__(self, record: bytes, *, wants_usage: bool) -> None:
        events = EventFilter(wants_usage=wants_usage)
        self._events = events.feed(record) + DONE
        self.usage = events.usage or Usage(0, events.chunks, estimated=True)

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        yield self._events

    async def aclose(self) -> None:
        """Nothing to let go of."""


def _wish(context: RequestContext) -> str:
    wish = context.headers.get(HEADER, "").strip().lower()
    if wish and wish not in _WISHES:
        raise InvalidRequestError(f"the header {HEADER} is one of {', '.join(_WISHES)}")
    return wish


def _may_keep(context: RequestContext, settings: CacheSettings, wish: str) -> bool:
    choice = context.choice
    if choice is not None and not choice.model and choice.cache_key is None:
        return False
    if wish:
        return wish != "off"
    if context.route == "embeddings" or settings.sampled:
        return True
    temperature = context.body.get("temperature")
    return isinstance(temperature, (int, float)) and temperature == 0


def _version(context: RequestContext) -> list[object]:
    """What answers under the model's name now: an answer of anything else is none of this."""
    served = [(t.upstream.config.url, t.name, t.served.version or "") for t in context.candidates]
    route = "" if context.choice is None else context.choice.cache_key
    return [context.release, context.version, route, sorted(served)]


def _fingerprint(context: RequestContext, version: object) -> bytes:
    """Of all that can make a difference to the answer, and of whose it is.

    Not of ``stream``: one form is made of the other.
    """
    body = context.body
    asked = {name: body[name] for name in body.keys() - {"model", "stream", "stream_options"}}
    parts = [context.tenant, context.route, context.model, version, asked]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()
