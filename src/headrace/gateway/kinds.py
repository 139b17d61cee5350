"""What differs between OpenAI-compatible engines: one small adapter each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine's habits.

    ``probe``: the path asked to see whether it lives, below the host if it begins with ``/``, else below the
    API's address. ``renames``: fields of chat requests that it knows by another name. ``failures``: statuses
    below 500 with which it reports failures of its own.
    """

    probe: str
    renames: tuple[tuple[str, str], ...] = ()
    failures: frozenset[int] = frozenset()

    def body(self, asked: dict[str, Any], model: str, *, chat: bool) -> bytes:
        """The request as this engine takes it, usage always asked for."""
        body = {**asked, "model": model}
        if body.get("stream"):
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if chat:
            for ours, theirs in self.renames:
                if ours in body:
                    value = body.pop(ours)
                    body.setdefault(theirs, value)
        return orjson.dumps(body)

    def failed(self, status: int) -> bool:
        """Whether an answer's status says that the engine failed, and another one may do better."""
        return status >= 500 or status in self.failures or status == 408


KINDS: dict[str, Kind] = {
    # Anything else that speaks OpenAI's API. It need not have a health route.
    "compatible": Kind(probe="models"),
    "headrace": Kind(probe="/health/readiness"),
    "vllm": Kind(probe="/health"),
    # 503 while it loads its model, in /health as in every route.
    "llamacpp": Kind(probe="/health"),
    # 424 is its "generation failed".
    "tgi": Kind(probe="/health", failures=frozenset({424})),
    # Its reasoning models refuse max_tokens, and all of its models take the newer name.
    "openai": Kind(probe="models", renames=(("max_tokens", "max_completion_tokens"),)),
}


def told_error(body: bytes) -> tuple[str, str | None, str | None, str | None] | None:
    """Message, type, param and code of an error in any of the shapes that engines use; None if it is none.

    OpenAI writes ``{"error": {"message", "type", "param", "code"}}``, llama.cpp has a number as the code, TGI
    ``{"error": "text", "error_type": "validation"}``, older vLLM the fields on the outside, and servers made
    with FastAPI ``{"detail": …}``.
    """
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict):
        return None
    error = told.get("error")
    if isinstance(error, str):
        return error, _text(told.get("error_type")), None, None
    if not isinstance(error, dict):
        error = told if told.get("object") == "error" else {"message": told.get("detail")}
    message = error.get("message")
    if not message:
        return None
    text = message if isinstance(message, str) else orjson.dumps(message).decode()
    return text, _text(error.get("type")), _text(error.get("param")), _text(error.get("code"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
