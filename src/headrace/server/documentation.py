"""OpenAPI for routes whose bodies are msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from headrace.server import requests, responses, tokenize
from headrace.server.middleware import GUARDED
from headrace.web.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_BODIES: dict[str, type] = {
    "/v1/chat/completions": requests.ChatCompletionRequest,
    "/v1/completions": requests.CompletionRequest,
    "/v1/embeddings": requests.EmbeddingRequest,
    "/tokenize": tokenize.TokenizeRequest,
    "/detokenize": tokenize.DetokenizeRequest,
}
_ANSWERS: dict[str, type] = {
    "/v1/chat/completions": responses.ChatCompletion,
    "/v1/completions": responses.Completion,
    "/v1/embeddings": responses.EmbeddingList,
    "/tokenize": tokenize.Tokens,
    "/detokenize": tokenize.Detokenized,
    "/v1/models": responses.ModelList,
    "/v1/models/{name:path}": responses.ModelCard,
    "/health": responses.Health,
    "/health/readiness": responses.Health,
}
_EVENTS: dict[str, type] = {
    "/v1/chat/completions": responses.ChatCompletionChunk,
    "/v1/completions": responses.Completion,
}
_RESUME = "/v1/requests/{name}"
# One event of a stream; its data is a chunk's JSON or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_REFUSALS = {
    "400": "The request can never succeed as it stands; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "409": "`resume` is of a server with another `system_fingerprint`.",
    "413": "The body is over the server's limit.",
    "415": "The body is compressed.",
    "500": "Generation failed.",
    "503": "Loading, draining or overloaded: try again after `retry-after` seconds.",
    "504": "The request's `timeout_s` has passed, or cannot be kept.",
}
_RESUME_REFUSALS = {
    "400": "`Last-Event-ID` is no id of an event of this answer.",
    "401": "The API key is missing or wrong.",
    "404": "No such answer is kept for you.",
    "409": "It cannot go on from there.",
    "500": "Generation failed.",
    "503": "Loading or draining: try again after `retry-after` seconds.",
    "504": "The request's `timeout_s` has passed.",
}


def operation(path: str, method: str, *, authenticated: bool) -> dict[str, Any]:
    """What OpenAPI says of a route beyond its summary."""
    out: dict[str, Any] = {"responses": {}}
    if path == _RESUME:
        return _resume(method, authenticated=authenticated)
    if path in _BODIES:
        body = {"application/json": {"schema": _ref(_BODIES[path])}}
        out["requestBody"] = {"required": True, "content": body}
    if path in _ANSWERS:
        content: dict[str, Any] = {"application/json": {"schema": _ref(_ANSWERS[path])}}
        if path in _EVENTS:
            content["text/event-stream"] = {"schema": _EVENT}
        out["responses"]["200"] = {"content": content}
    else:
        out["responses"]["200"] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    errors: tuple[str, ...] = ()
    if path.startswith("/health"):
        out["responses"]["503"] = {
            "description": "Not serving.",
            "content": {"application/json": {"schema": _ref(responses.Health)}},
        }
    elif path in _BODIES:
        errors = tuple(_REFUSALS)
    elif "{" in path:
        errors = ("401", "404")
    elif path.startswith("/v1/"):
        errors = ("401",)
    for status in errors:
        out["responses"][status] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _ref(ErrorBody)}},
        }
    if authenticated and path.startswith(GUARDED):
        out["security"] = [{"apiKey": []}]
    return out


def _resume(method: str, *, authenticated: bool) -> dict[str, Any]:
    """Of the route that goes on with an answer: the answer of either generation route."""
    answers = {
        "application/json": {
            "schema": {"oneOf": [_ref(responses.ChatCompletion), _ref(responses.Completion)]}
        },
        "text/event-stream": {"schema": _EVENT},
    }
    ended = {"204": {"description": "It has ended and is forgotten."}}
    out: dict[str, Any] = {
        "responses": {"200": {"content": answers}} if method == "GET" else ended,
    }
    if method == "GET":
        out["parameters"] = [
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "Of a stream: the id of the last event that has arrived.",
                "schema": {"type": "string"},
            }
        ]
    for status in _RESUME_REFUSALS:
        out["responses"][status] = {
            "description": _RESUME_REFUSALS[status],
            "content": {"application/json": {"schema": _ref(ErrorBody)}},
        }
    if authenticated:
        out["security"] = [{"apiKey": []}]
    return out


def install(app: FastAPI) -> None:
    """Make ``app.openapi()`` carry the structs' schemas and nothing that no route uses."""
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made_by_fastapi()
            structs = {*_BODIES.values(), *_ANSWERS.values(), *_EVENTS.values(), ErrorBody}
            _, components = msgspec.json.schema_components(structs, ref_template=_REF)
            schema["components"] = {
                "schemas": components,
                "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            }
            for path in schema["paths"].values():
                for method in path.values():
                    method["responses"].pop("422", None)  # this server answers 400
                    content = method["responses"].get("200", {}).get("content", {})
                    if "text/plain" in content:
                        content.pop("application/json", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _ref(struct: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}
