"""The admin API as an application: who may ask, within which bounds, and how it says no."""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.errors import AuthenticationError, ConfigError, HeadraceError, InvalidRequestError
from headrace.gateway.admin import routes
from headrace.gateway.config import secret
from headrace.gateway.gateway import Gateway
from headrace.web.errors import error_response
from headrace.web.http import ClientGone, read_body

_MAX_BYTES = 64 * 2**10
_READ_S = 10.0
_LEAST_KEY = 16  # characters

_bearer = HTTPBearer(auto_error=False, description="The admin API's key.")


class AdminApp:
    """The application over a gateway that has an ``admin`` section."""

    def __init__(self, gateway: Gateway) -> None:
        """Raises ConfigError if the API's key is missing in the environment, or easy to guess."""
        settings = gateway.config.admin
        assert settings is not None
        key = secret(settings.key_env, "the key of the admin API")
        if len(key) < _LEAST_KEY:
            raise ConfigError(f"{settings.key_env} must have {_LEAST_KEY} characters at least")
        self._gateway = gateway
        self._key = _digest(key)
        self._app = self._made()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; never raises on account of the request."""
        if scope["type"] != "http":
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            body = await read_body(Request(scope, receive), _MAX_BYTES, _READ_S)
            await self._app(scope, _given(body), noting)
        except ClientGone:
            return
        except Exception as error:
            if not isinstance(error, HeadraceError):
                self._gateway.log.error("unexpected error in the admin API", exc_info=error)
                error = HeadraceError("something went wrong in the gateway; it is logged")
            if not started:
                await error_response(error)(scope, receive, send)

    def _made(self) -> FastAPI:
        app = FastAPI(
            title="headrace gateway: admin API",
            version="1",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,  # to where the Host header says
            dependencies=[Depends(self._authenticate)],
        )
        app.state.gateway = self._gateway
        app.include_router(routes.router)

        @app.get("/openapi.json", include_in_schema=False)
        async def openapi() -> dict[str, Any]:
            return _without_422(app.openapi())

        app.add_exception_handler(HeadraceError, _refused)
        app.add_exception_handler(RequestValidationError, _misread)
        app.add_exception_handler(HTTPException, _nowhere)
        return app

    async def _authenticate(
        self, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        if given is None or not hmac.compare_digest(_digest(given.credentials), self._key):
            raise AuthenticationError(
                "the admin API's key is missing or wrong; send it as `Authorization: Bearer …`"
            )


def _digest(key: str) -> bytes:
    """Of equal length for keys of any length."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _given(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _without_422(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, without the refusals that FastAPI has by itself: this API answers 400."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    return schema


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    if isinstance(error, ConfigError):  # what is asked does not go with the file, or with what is under way
        error.status, error.type = 409, InvalidRequestError.type
    return error_response(error)


async def _misread(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return error_response(InvalidRequestError(f"`{field[:200]}`: {first['msg']}", param=field[:200]))


async def _nowhere(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method[:20]} {request.url.path[:200]}"
    refused = InvalidRequestError(f"{where}: {error.detail}; GET /openapi.json has what there is")
    refused.status, refused.code = error.status_code, "not_found"
    response = error_response(refused)
    response.headers.update(error.headers or {})
    return response
