"""The outermost layer: request ids, API keys, timing, one log line a request, and errors nobody expected."""

from __future__ import annotations

import hmac
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import AuthenticationError, HeadraceError
from headrace.server.state import ServerState
from headrace.web import ids
from headrace.web.errors import error_response
from headrace.web.http import ClientGone

GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Paths that ask for the API key, where there is one."""
_QUIET = ("/health", "/health/readiness", "/metrics")
CLIENT_GONE_STATUS = 499


class Outermost:
    """Wraps the whole application. ``scope["state"]`` gets ``request_id`` and ``log``, the line's fields."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; never raises on account of the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = ids.request_id(headers.get("x-request-id", ""))
        line: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=line)
        status = CLIENT_GONE_STATUS

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(raw=message["headers"])
                out["x-request-id"] = request_id
                out["openai-processing-ms"] = str(round((time.perf_counter() - began) * 1000))
                if self._state.phase == "draining":
                    out["connection"] = "close"
            await send(message)

        try:
            if scope["path"].startswith(GUARDED) and not self._allowed(headers):
                raise AuthenticationError(
                    "the API key is missing or wrong; send it as `Authorization: Bearer <key>`"
                )
            await self._app(scope, receive, send_with_headers)
        except ClientGone:
            line["client_gone"] = True
        except Exception as error:
            if not isinstance(error, HeadraceError):
                self._state.log.error("unexpected error", request_id=request_id, exc_info=error)
                error = HeadraceError(f"something went wrong in the server; it is logged as {request_id}")
            if status == CLIENT_GONE_STATUS:
                await error_response(error)(scope, receive, send_with_headers)
        finally:
            self._log(scope, request_id, status, time.perf_counter() - began, line)

    def _allowed(self, headers: Headers) -> bool:
        key = self._state.settings.api_key
        if key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # compared in constant time, so that a wrong key teaches nothing about the right one
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())

    def _log(
        self, scope: Scope, request_id: str, status: int, duration_s: float, line: dict[str, Any]
    ) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")
        self._state.metrics.http_requests.labels(path, str(status)).inc()
        if path in _QUIET and status in (200, 503):
            return
        self._state.log.info(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            duration_ms=round(duration_s * 1000, 1),
            **line,
        )
