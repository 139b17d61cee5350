"""Tokens of a request: estimated before it runs, told by the upstream after it, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.gateway.config import Price

BYTES_PER_TOKEN = 3
"""English has about 4 with today's vocabularies: what is reserved shall rather be too much."""
_PER_MESSAGE = 8  # role and marks of a chat template


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``cached``: those of the prompt that the upstream had in its cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    estimated: bool = False

    @property
    def total(self) -> int:
        """All tokens."""
        return self.prompt + self.completion

    def with_told(self, tokens: int) -> Usage:
        """Of an answer of which so many tokens were in the prompt, because another upstream had told them."""
        prompt = max(self.prompt - tokens, 0)
        return Usage(prompt, self.completion + tokens, min(self.cached, prompt), estimated=True)


def as_told(usage: Usage) -> dict[str, Any]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def told(usage: object) -> Usage | None:
    """What an upstream's ``usage`` object says; None if it is none, or says impossible things."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    numbers = (usage.get("prompt_tokens"), usage.get("completion_tokens") or 0, cached or 0)
    sane = [number for number in numbers if type(number) is int and 0 <= number < 2**40]
    if len(sane) < len(numbers):
        return None
    prompt, completion, cached = sane
    return Usage(prompt, completion, min(cached, prompt))


def prompt_estimate(body: dict[str, Any]) -> int:
    """About how many tokens the prompt has, rather too many: nobody here knows the model's vocabulary."""
    size, tokens = 0, 0
    waiting: list[object] = [body.get(name) for name in ("messages", "prompt", "input", "tools")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            size += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
        elif isinstance(part, dict):
            waiting += part.values()
            tokens += _PER_MESSAGE if "role" in part else 1
        elif isinstance(part, list):
            waiting += part
        elif part is not None:
            tokens += 1  # a token's id, or a number of a schema
    return tokens + -(-size // BYTES_PER_TOKEN)


def cost(price: Price, usage: Usage) -> int:
    """In 1e-9 dollars."""
    cached = price.input if price.cached_input is None else price.cached_input
    fresh = usage.prompt - usage.cached
    return round((fresh * price.input + usage.cached * cached + usage.completion * price.output) * 1000)


def nano(usd: float) -> int:
    """Dollars in 1e-9 dollars."""
    return round(usd * 1e9)
