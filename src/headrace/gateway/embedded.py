"""A gateway inside a server: on its port, with the server's own application as an upstream."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import HeadraceError, OverloadedError
from headrace.gateway.app import GatewayApp
from headrace.gateway.authenticate import authenticate
from headrace.gateway.context import RequestContext
from headrace.gateway.gateway import Gateway
from headrace.gateway.run import admin_server, drain, reload_on_hangup
from headrace.web.errors import error_response

_HEALTH = ("/health", "/health/readiness")
_METRICS = "/metrics"
_KEYED = ("/tokenize", "/detokenize")


class Embedded:
    """The gateway has all of ``/v1``; health, documentation and metrics are the server's, and so are
    tokens, for who has a key.

    ``server``: the application. ``admin``: its API's socket.
    """

    def __init__(self, gateway: Gateway, server: ASGIApp, admin: socket.socket | None) -> None:
        """Raises ConfigError if the admin API's key is not in the environment."""
        self._gateway = gateway
        self._server = server
        self._app = GatewayApp(gateway)
        self._admin = None if admin is None else (admin_server(gateway), admin)
        self._serving: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()
        self._opened = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; never raises on account of the request."""
        path = scope.get("path", "")
        if scope["type"] != "http":
            await self._server(scope, receive, send)
        elif path in _KEYED or (path.startswith("/v1/") and not self._opened):
            refused = await self._refused(scope)
            await (self._server if refused is None else error_response(refused))(scope, receive, send)
        elif path.startswith("/v1/") or (path in _HEALTH and self._gateway.phase == "draining"):
            await self._app(scope, receive, send)
        elif path == _METRICS:
            await self._server(scope, receive, self._with_metrics(send))
        else:
            await self._server(scope, receive, send)

    async def _refused(self, scope: Scope) -> HeadraceError | None:
        """Why what the gateway does not do itself is not done at all; None if it may be."""
        if not self._opened:
            return OverloadedError("the model is still loading; try again in a moment")
        try:
            await authenticate(
                self._gateway, RequestContext("", "completions", Headers(scope=scope), b"", 0.0)
            )
        except HeadraceError as error:
            return error
        return None

    def _with_metrics(self, send: Send) -> Send:
        """The gateway's metrics behind the server's, which share no name."""

        async def both(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"content-length"]
                message = {**message, "headers": headers}
            elif not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + self._gateway.metrics.render()}
            await send(message)

        return both

    async def open(self) -> None:
        """The server has its model: requests go through the gateway from now on."""
        await self._stack.enter_async_context(self._gateway)
        if self._admin is not None:
            server, listening = self._admin
            self._serving = asyncio.create_task(server.serve(sockets=[listening]))
        if self._gateway.path is not None:
            reload_on_hangup(self._gateway)
        self._opened = True

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._gateway.phase = "draining"

    async def drained(self, timeout_s: float) -> None:
        """Wait until nothing is under way; after ``timeout_s`` what is left is told so."""
        await drain(self._gateway, timeout_s)

    async def close(self) -> None:
        """Let go of upstreams and state."""
        if self._admin is not None and self._serving is not None:
            self._admin[0].should_exit = True
            await self._serving
        await self._stack.aclose()
