"""Errors as OpenAI's clients expect them: a JSON body, or the event that ends a stream."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from headrace.errors import HeadraceError, LimitError, OverloadedError

_encode = msgspec.json.Encoder().encode


class ErrorDetail(msgspec.Struct):
    """OpenAI's error: ``param`` names the offending field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Answer of every route that refuses or fails."""

    error: ErrorDetail


def error_body(error: HeadraceError) -> bytes:
    """``error`` as OpenAI's JSON body."""
    return _encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def error_response(error: HeadraceError) -> Response:
    """``error`` as an answer, with ``retry-after`` in seconds where trying again makes sense."""
    headers = {}
    if isinstance(error, (LimitError, OverloadedError)):
        headers["retry-after"] = str(max(math.ceil(error.retry_after_s), 1))
    elif error.status in (429, 503):
        headers["retry-after"] = "1"
    if error.code == "deadline_exceeded":
        headers["x-should-retry"] = "false"  # OpenAI's clients would try again with the same timeout
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


def error_event(error: HeadraceError) -> bytes:
    """``error`` as the event that ends a stream."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
