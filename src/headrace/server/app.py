"""The application: routes, errors and documentation over one server's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError, InvalidRequestError
from headrace.observe.metrics import CONTENT_TYPE
from headrace.server import documentation
from headrace.server.embeddings import EmbeddingRoutes
from headrace.server.middleware import Outermost
from headrace.server.responses import Health, ModelCard, ModelList, encode
from headrace.server.resume_routes import ResumeRoutes
from headrace.server.routes import GenerationRoutes
from headrace.server.state import ServerSettings, ServerState
from headrace.server.tokenize import TokenizeRoutes
from headrace.web.errors import error_response

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend


def create_app(frontend: Frontend, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application that serves ``frontend``, which stays the caller's to close."""
    state = ServerState(settings or ServerSettings())
    state.ready(frontend)
    return build_app(state)


def build_app(state: ServerState) -> FastAPI:
    """The application over ``state``, which may still be loading its model."""
    from headrace import __version__

    app = FastAPI(
        title="headrace",
        version=__version__,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.server = state
    routes = GenerationRoutes(state)
    embeddings = EmbeddingRoutes(state)
    resume = ResumeRoutes(state)
    tokenize = TokenizeRoutes(state)
    plain = _PlainRoutes(state)
    for path, method, handler in (
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/embeddings", "POST", embeddings.embeddings),
        ("/tokenize", "POST", tokenize.tokenize),
        ("/detokenize", "POST", tokenize.detokenize),
        ("/v1/requests/{name}", "GET", resume.resume),
        ("/v1/requests/{name}", "DELETE", resume.end),
        ("/v1/models", "GET", plain.models),
        ("/v1/models/{name:path}", "GET", plain.model),
        ("/health", "GET", plain.health),
        ("/health/readiness", "GET", plain.readiness),
        ("/metrics", "GET", plain.metrics),
    ):
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            name=handler.__name__,
            openapi_extra=documentation.operation(
                path, method, authenticated=state.settings.api_key is not None
            ),
        )
    documentation.install(app)
    app.add_middleware(Outermost, state=state)

    async def on_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HeadraceError)
        return error_response(error)

    async def on_http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_as_error(http, error))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(HeadraceError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    return app


def _as_error(http: Request, error: HTTPException) -> HeadraceError:
    """Starlette's own refusals (unknown path, wrong method) in our words."""
    where = f"{http.method} {http.url.path[:200]}"
    if error.status_code == 404:
        made = InvalidRequestError(f"there is nothing at {where}; see /docs for the routes")
        made.code = "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        made = InvalidRequestError(f"{where} is not possible; use {allowed}")
        made.code = "method_not_allowed"
    else:
        made = InvalidRequestError(str(error.detail))
    made.status = error.status_code
    return made


class _PlainRoutes:
    """Handlers of the routes that generate nothing."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, _: Request) -> Response:
        """The models that are served here: one, under each of its names."""
        return _json(ModelList([self._card(name) for name in self._state.names]))

    async def model(self, name: str) -> Response:
        """One model by name."""
        self._state.check_model(name)
        return _json(self._card(name))

    def _card(self, name: str) -> ModelCard:
        loaded = self._state.loaded
        longest = loaded.max_model_len if loaded is not None else None
        return ModelCard(name, self._state.started, longest, self._state.names[0])

    async def health(self, _: Request) -> Response:
        """200 while the process is worth keeping: loading, serving or draining."""
        phase = self._state.phase
        return _json(Health(phase), 503 if phase == "failed" else 200)

    async def readiness(self, _: Request) -> Response:
        """200 only while new requests are served."""
        phase = self._state.phase
        return _json(Health(phase), 200 if phase == "ok" else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics in text format."""
        return Response(self._state.metrics.render(), media_type=CONTENT_TYPE)


def _json(body: Health | ModelCard | ModelList, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")
