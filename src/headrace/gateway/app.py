"""The gateway over HTTP: an ASGI application around the pipeline."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.errors import (
    HeadraceError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    StateError,
)
from headrace.gateway import feedback, pipeline
from headrace.gateway.authenticate import authenticate
from headrace.gateway.cache import HEADER, SIMILARITY_HEADER
from headrace.gateway.context import RequestContext, Route
from headrace.gateway.gateway import Gateway
from headrace.gateway.intents.policy import HEADER as ROUTE_HEADER
from headrace.gateway.parse import may_use, options_of
from headrace.gateway.quotas import NANO, Remaining
from headrace.observe.metrics import CONTENT_TYPE
from headrace.web.errors import error_response
from headrace.web.http import ClientGone, EventStream, read_body, while_connected
from headrace.web.ids import request_id

_GENERATING: dict[str, Route] = {
    "/v1/chat/completions": "chat/completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
_MODELS = "/v1/models"
_FEEDBACK = "/v1/feedback"
_QUIET = ("/health", "/health/readiness", "/metrics")
_CLIENT_GONE_STATUS = 499

Handler = Callable[[Request, Send, str], Awaitable[None]]


class GatewayApp:
    """The application over an open gateway, which stays the caller's to close."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; never raises on account of the request."""
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        line: dict[str, Any] = {}
        status = _CLIENT_GONE_STATUS
        own_id = request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["log"] = line

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = own_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began) * 1000))
                if self._gateway.phase == "draining":
                    headers["connection"] = "close"
            await send(message)

        try:
            await self._handler(scope)(Request(scope, receive), send_with_headers, own_id)
        except ClientGone:
            line["client_gone"] = True
        except Exception as error:
            if status == _CLIENT_GONE_STATUS:
                refused = error_response(self._known(error, own_id))
                await refused(scope, receive, send_with_headers)
            else:
                self._known(error, own_id)
        finally:
            if scope["path"] not in _QUIET:
                self._gateway.log.info(
                    "request",
                    request_id=own_id,
                    method=scope["method"],
                    path=scope["path"][:200],
                    status=status,
                    duration_ms=round((time.perf_counter() - began) * 1000, 1),
                    **line,
                )

    def _known(self, error: Exception, own_id: str) -> HeadraceError:
        if not isinstance(error, HeadraceError):
            self._gateway.log.error("unexpected error", request_id=own_id, exc_info=error)
            error = HeadraceError(f"something went wrong in the gateway; it is logged as {own_id}")
        self._gateway.metrics.refusals.labels(str(error.status)).inc()
        return error

    def _handler(self, scope: Scope) -> Handler:
        path, method = scope["path"], scope["method"]
        handler: Handler | None = None
        allowed = "GET"
        if path in _GENERATING:
            handler, allowed = self._generate, "POST"
        elif path == _MODELS or path.startswith(f"{_MODELS}/"):
            handler = self._models
        elif path == _FEEDBACK:
            handler, allowed = self._feedback, "POST"
        elif path in _QUIET:
            handler = self._plain
        if handler is not None and method == allowed:
            return handler
        where = f"{method[:20]} {path[:200]}"
        error = InvalidRequestError(f"there is nothing at {where}")
        error.status, error.code = 404, "not_found"
        if handler is not None:
            error = InvalidRequestError(f"{where} is not possible; use {allowed}")
            error.status, error.code = 405, "method_not_allowed"
        raise error

    async def _generate(self, request: Request, send: Send, own_id: str) -> None:
        gateway, config = self._gateway, self._gateway.config
        if gateway.phase == "draining":
            raise OverloadedError("the gateway is shutting down; try again elsewhere or later")
        deadline = time.monotonic() + config.request_timeout_s
        body = await read_body(request, config.max_body_mib * 2**20, config.read_timeout_s)
        route = _GENERATING[request.scope["path"]]
        context = RequestContext(own_id, route, request.headers, body, deadline)
        gateway.live.add(context)
        try:
            await while_connected(request.receive, pipeline.answer(gateway, context))
            if isinstance(context.answer, bytes):
                response = Response(context.answer, media_type="application/json")
            else:
                assert context.answer is not None
                response = EventStream(context.answer, write_timeout_s=config.write_timeout_s)
            response.headers.update(_headers(context))
            await response(request.scope, request.receive, send)
        except HeadraceError as error:
            refused = error_response(error)
            refused.headers.update(_headers(context))
            self._known(error, own_id)
            await pipeline.finish(gateway, context)  # a client that is slow to read this holds no place
            await refused(request.scope, request.receive, send)
        finally:
            gateway.live.discard(context)
            await pipeline.finish(gateway, context)
            request.scope["state"]["log"].update(_line(context))

    async def _models(self, request: Request, send: Send, own_id: str) -> None:
        """What the key may use: models and aliases."""
        context = RequestContext(own_id, "chat/completions", request.headers, b"", time.monotonic())
        await authenticate(self._gateway, context)
        gateway = self._gateway

        def may_ask(name: str, model: str) -> bool:
            policy = gateway.routes.get(model)
            return (
                may_use(context, name, model) if policy is None else bool(options_of(context, name, policy))
            )

        names = {name: name for name in gateway.targets} | gateway.config.aliases
        names |= {name: name for name in (*gateway.config.releases, *gateway.routes)}
        cards = {name: self._card(name, model) for name, model in names.items() if may_ask(name, model)}
        wanted = request.scope["path"].removeprefix(_MODELS).removeprefix("/")
        if not wanted:
            await self._json({"object": "list", "data": list(cards.values())}, request, send)
        elif wanted in cards:
            await self._json(cards[wanted], request, send)
        else:
            raise ModelNotFoundError(f"the model `{wanted[:200]}` does not exist here, or not for this key")

    def _card(self, name: str, model: str) -> dict[str, Any]:
        if model in self._gateway.releases:
            release, state = self._gateway.releases[model]
            model = release.versions[state.stable].model
        policy = self._gateway.routes.get(model)
        models = [model] if policy is None else policy.settings.candidates
        targets = [target for each in models for target in self._gateway.targets_behind(each)]
        contexts = [target.context for target in targets]
        longest = max((length for length in contexts if length is not None), default=None)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "root": model,
            "max_model_len": longest,
        }

    async def _feedback(self, request: Request, send: Send, own_id: str) -> None:
        body = await read_body(request, feedback.MAX_BYTES, self._gateway.config.read_timeout_s)
        context = RequestContext(own_id, "chat/completions", request.headers, body, time.monotonic())
        await authenticate(self._gateway, context)
        given = feedback.read_feedback(body)
        await feedback.give(self._gateway, context.tenant, given)
        told = {"object": "feedback", "request_id": given.request_id, "score": given.score}
        await self._json(told, request, send)

    async def _plain(self, request: Request, send: Send, _: str) -> None:
        path = request.scope["path"]
        if path == "/metrics":
            page = Response(self._gateway.metrics.render(), media_type=CONTENT_TYPE)
            await page(request.scope, request.receive, send)
            return
        phase: str = self._gateway.phase
        status = 200
        if path == "/health/readiness":
            upstreams = self._gateway.upstreams.values()
            if not any(at.health.share() > 0 and not at.drained and not at.away for at in upstreams):
                phase = "no upstream"
            try:
                await self._gateway.store.now()
            except StateError:
                phase = "no state"
            status = 200 if phase == "ok" else 503
        await self._json({"status": phase}, request, send, status)

    async def _json(self, body: dict[str, Any], request: Request, send: Send, status: int = 200) -> None:
        response = Response(orjson.dumps(body), status, media_type="application/json")
        await response(request.scope, request.receive, send)


def _headers(context: RequestContext) -> dict[str, str]:
    out: dict[str, str] = {HEADER: context.cache} if context.admitted else {}
    if context.similarity is not None:
        out[SIMILARITY_HEADER] = f"{context.similarity:.4f}"
    if context.target is not None and context.answer is not None:
        out["x-headrace-upstream"] = context.target.upstream.name
    out |= _choice(context)
    if context.version:
        out["x-headrace-version"] = context.version
    if context.template:
        out["x-headrace-template"] = context.template
    if context.parts:
        out |= _parts(context)
    if isinstance(context.answer, bytes):  # what a stream costs is known at its end: the ledger has it
        out["x-headrace-cost-usd"] = f"{context.nano_usd / NANO:.9f}"
    if context.reservation is not None:
        _add_limit(out, "requests", context.reservation.requests_left)
        _add_limit(out, "tokens", context.reservation.tokens_left)
    return out


def _choice(context: RequestContext) -> dict[str, str]:
    """What a route made of the request; nothing of a hit in the cache, for which nothing was chosen."""
    choice = context.choice
    if choice is None or not choice.model:
        return {}
    out = {ROUTE_HEADER: choice.model, f"{ROUTE_HEADER}-reason": choice.reason or ""}
    if choice.judgement is not None:
        out["x-headrace-intent"] = choice.judgement.intent
        out["x-headrace-intent-by"] = choice.judgement.seen
        out["x-headrace-confidence"] = f"{choice.judgement.confidence:.3f}"
        out["x-headrace-difficulty"] = f"{choice.judgement.difficulty:.3f}"
    return out


def _parts(context: RequestContext) -> dict[str, str]:
    """What the parts of a document used; the answer's own usage is that of the merge."""
    parts, plan = context.parts, context.split
    return {
        "x-headrace-document-plan": "" if plan is None else plan.name,
        "x-headrace-parts": str(len(parts)),
        "x-headrace-parts-prompt-tokens": str(sum(part.prompt_tokens for part in parts)),
        "x-headrace-parts-completion-tokens": str(sum(part.completion_tokens for part in parts)),
        "x-headrace-parts-cost-usd": f"{sum(part.nano_usd for part in parts) / NANO:.9f}",
    }


def _add_limit(out: dict[str, str], what: str, left: Remaining | None) -> None:
    if left is not None:
        out[f"x-ratelimit-limit-{what}"] = str(left.limit)
        out[f"x-ratelimit-remaining-{what}"] = str(left.remaining)
        out[f"x-ratelimit-reset-{what}"] = f"{left.reset_s:g}s"


def _line(context: RequestContext) -> dict[str, Any]:
    """The request's fields in the log: never its content."""
    usage = context.usage
    return {
        "tenant": context.tenant,
        "app": context.app,
        "model": context.model,
        "release": context.release,
        "version": context.version,
        "upstream": context.target.upstream.name if context.target is not None else None,
        "outcome": context.outcome,
        "cache": context.cache,
        "template": context.template or None,
        "parts": len(context.parts) or None,
        "prompt_tokens": usage.prompt if usage is not None else None,
        "completion_tokens": usage.completion if usage is not None else None,
        "cost_usd": context.nano_usd / NANO,
    }
