"""Errors as OpenAI's clients expect them: a JSON body, or the event that ends a stream."""

from __future__ import annotations

import msgspec

from headrace.errors import HeadraceError

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


def error_event(error: HeadraceError) -> bytes:
    """``error`` as the event that ends a stream."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
