"""The ways in which clients ask for structured output: OpenAI's ``response_format`` and vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from headrace.engine.request import SamplingParams, StructuredOutputs
from headrace.errors import InvalidRequestError

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend
    from headrace.server.requests import GenerationRequest

GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's older names, by field."""


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's envelope of a schema. ``strict`` or not, the answer follows the schema as it stands."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``text``, ``json_object`` (any object) or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def structured_outputs(request: GenerationRequest) -> tuple[str, StructuredOutputs] | None:
    """Which field asks for structured output, and what it asks for; None if none does.

    Raises InvalidRequestError if two ask, or one does not say what for.
    """
    found: list[tuple[str, StructuredOutputs]] = []
    form = request.response_format
    if form is not None and form.type != "text":
        found.append(("response_format", StructuredOutputs(json=_schema(form))))
    if request.structured_outputs is not None:
        found.append(("structured_outputs", request.structured_outputs))
    for field, kind in GUIDED.items():
        if (value := getattr(request, field)) is not None:
            found.append((field, StructuredOutputs(**{kind: value})))
    if len(found) > 1:
        raise InvalidRequestError(
            f"`{found[0][0]}` and `{found[1][0]}` both say what the answer looks like; send one of them",
            param=found[1][0],
        )
    for field, wanted in found:
        with_field(field, wanted.source)
        return field, wanted
    return None


def compile_grammar(frontend: Frontend, params: SamplingParams, field: str) -> None:
    """Have the grammar of ``params`` ready; blocks. Raises InvalidRequestError that names ``field``."""
    wanted = params.structured_outputs
    if wanted is not None:
        with_field(field, lambda: frontend.compile(wanted))


def with_field(field: str, call: Callable[[], Any], *, where: str = "") -> None:
    """``call()``, whose refusal is put down to the client's own word for what it refuses."""
    try:
        call()
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"`{field}`: {where}{error.message[:1].lower()}{error.message[1:]}", param=field
        ) from None


def _schema(form: ResponseFormat) -> dict[str, Any] | bool:
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidRequestError(
            '`response_format`: type "json_schema" needs `json_schema.schema`, an object',
            param="response_format",
        )
    return form.json_schema.schema
