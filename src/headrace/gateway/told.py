"""What an upstream tells of itself between requests: its state, its load, and which models it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Literal

import orjson

State = Literal["unknown", "loaded", "loading", "draining", "failed"]
"""``unknown``: nothing was asked yet. ``loading`` and ``draining`` upstreams get nothing while there are
others, which is no fault of theirs: they come back with all of their weight."""

MAX_BYTES = 4 * 2**20  # of a page


def state_of(status: int, page: bytes) -> State:
    """Of a probe's answer: ours say it in ``status``, llama.cpp in the message of an error."""
    if status < 500:
        return "loaded"
    if status != 503:
        return "failed"
    told = _object(page)
    error = told.get("error")
    words = [told.get("status"), error.get("message") if isinstance(error, dict) else error]
    said = " ".join(word for word in words if isinstance(word, str)).lower()
    return "loading" if "loading" in said else "draining" if "draining" in said else "failed"


def requests_of(page: bytes, gauges: Iterable[str]) -> int | None:
    """The sum of some gauges in Prometheus' text format; None if one of them is not there."""
    text, total = page.decode("utf-8", "replace"), 0.0
    for name in gauges:
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}\n]*}})? +(\S+)", text, re.MULTILINE)
        try:
            values = [float(value) for value in found]
        except ValueError:
            return None
        if not values or not all(math.isfinite(value) and value >= 0 for value in values):
            return None
        total += sum(values)
    return int(min(total, 1e9))


def held_models(page: bytes) -> frozenset[str] | None:
    """The names of the models in memory, as Ollama lists them; None if that is no such list."""
    models = _object(page).get("models")
    if not isinstance(models, list):
        return None
    names = {each.get("name") for each in models if isinstance(each, dict)}
    # what has no tag is `latest`
    return frozenset(short for name in names if isinstance(name, str) for short in _names(name))


def _names(name: str) -> tuple[str, ...]:
    return (name, name.removesuffix(":latest"))


def _object(page: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(page)
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}
