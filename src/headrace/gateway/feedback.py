"""What clients think of answers: a score for a request, which counts for the version that answered it."""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from headrace.errors import InvalidRequestError, NotFoundError

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


def give(gateway: Gateway, tenant: str, feedback: Feedback) -> None:
    """Keep a score, once a request. Raises NotFoundError if the tenant has had no such request, and
    InvalidRequestError if it was scored before.
    """
    with gateway.store.transaction() as db:
        row = db.execute(
            "SELECT id, ended_at, release, version FROM ledger WHERE request = ? AND tenant = ? "
            "ORDER BY id DESC LIMIT 1",
            (feedback.request_id, tenant),
        ).fetchone()
        if row is None:
            raise NotFoundError(
                "no request with this id has ended here; send the x-request-id of one of your answers",
                param="request_id",
            )
        entry, ended_at, release, version = row
        try:
            db.execute("INSERT INTO feedback VALUES (?, ?, ?)", (entry, time.time(), feedback.score))
        except sqlite3.IntegrityError:
            error = InvalidRequestError("this request has its score already", param="request_id")
            error.status, error.code = 409, "already_scored"
            raise error from None
    if release:
        gateway.releases.scored(release, version, ended_at, feedback.score)
