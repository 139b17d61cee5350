"""What clients think of answers: a score for a request, which counts for the version that answered it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from headrace.errors import InvalidRequestError
from headrace.gateway import ledger

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway

MAX_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Feedback:
    """A score from 0 (bad) to 1 for the request with this id (``x-request-id`` of its answer)."""

    request_id: str
    score: float


def read_feedback(body: bytes) -> Feedback:
    """Raises InvalidRequestError for anything else than an id and a score."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    if unknown := asked.keys() - {"request_id", "score"}:
        name = min(unknown)[:100]
        raise InvalidRequestError(f"`{name}` is not known here; send `request_id` and `score`", param=name)
    request, score = asked.get("request_id"), asked.get("score")
    if not isinstance(request, str) or not 1 <= len(request) <= 128:
        raise InvalidRequestError("`request_id`: the x-request-id of an answer", param="request_id")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0 <= score <= 1:
        raise InvalidRequestError("`score`: a number from 0 (bad) to 1 (good)", param="score")
    assert math.isfinite(score)
    return Feedback(request, float(score))


async def give(gateway: Gateway, tenant: str, feedback: Feedback) -> None:
    """Keep a score. Raises NotFoundError if the tenant has had no such request, and InvalidRequestError if it
    has its score.
    """
    answered = await ledger.score(gateway.store, tenant, feedback.request_id, feedback.score)
    if answered.release:
        gateway.releases.scored(answered.release, answered.version, answered.ended_at, feedback.score)
