"""Logged requests or a template: which text they share, and what a prefix cache gains from having it first.

A prefix cache knows a prompt's beginning in blocks of 16 tokens, up to the first difference. One date at the
top of a system prompt therefore costs everything behind it. What is stable is found by comparing sentences
and lines across requests; what reordering gains is counted by replaying the log against such a cache, before
and after.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.lab.bench.workload import json_lines, turn_of

BLOCK = 16  # tokens that a prefix cache shares or does not
_MOST_REQUESTS = 5000
_STABLE_SHARE = 0.1  # of the requests that have a text, from which on it counts as stable
_OFTEN = (0.9, 0.5)  # what nearly all share comes before what half share, and so on
_SHOWN = 90

Message = dict[str, Any]
Tokens = Sequence[int] | Sequence[str]


class Part(msgspec.Struct, kw_only=True):
    """A stretch of the suggested order. ``share`` of the requests have it; ``tokens`` of one request."""

    stable: bool
    role: str
    text: str
    tokens: float
    share: float


class PromptAdvice(msgspec.Struct, kw_only=True):
    """``cached_*``: tokens of an average request that a prefix cache knows. ``counted`` with "tokenizer" or
    "estimate" (four characters a token). ``parts`` in the order to write them.
    """

    source: str
    requests: int
    counted: str
    tokens: float
    cached_now: float
    cached_after: float
    parts: list[Part]
    notes: list[str] = []

    @property
    def gain(self) -> float:
        """Tokens of an average request that reordering would let the cache know."""
        return max(self.cached_after - self.cached_now, 0.0)


class Counting(msgspec.Struct, frozen=True):
    """How text becomes tokens: ``tokens`` of a text, ``render`` of a conversation's text."""

    tokens: Callable[[str], Tokens]
    render: Callable[[list[Message]], str]
    name: str = "tokenizer"


def estimate() -> Counting:
    """Four characters a token; conversations line by line."""
    return Counting(
        lambda text: [text[at : at + 4] for at in range(0, len(text), 4)],
        lambda messages: "\n".join(f"{m.get('role', '')}\n{_text(m)}" for m in messages),
        "estimate",
    )


def counting(reference: str) -> Counting:
    """As the model ``reference`` counts, with its chat template. Raises HeadraceError if it can't be had."""
    from headrace.frontend.chat_template import ChatTemplate
    from headrace.frontend.tokenizer import load_tokenizer
    from headrace.model import store

    tokenizer = load_tokenizer(store.resolve(reference))
    render = estimate().render
    if tokenizer.chat_template is not None:
        template = ChatTemplate(
            tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        render = template.render
    return Counting(lambda text: tokenizer.encode(text, add_special_tokens=False), render)


def advise(path: Path, count: Counting) -> PromptAdvice:
    """Read ``path`` (JSON Lines, or a Jinja or format template) and say how to order it.

    Raises ConfigError that names the line.
    """
    if _is_template(path):
        from headrace.lab.diagnose.template import advise_template

        return advise_template(path, count)
    lines = json_lines(path)
    requests = [turn_of(value, where, 1).messages for value, where in lines[:_MOST_REQUESTS]]
    stable = _stable_texts(requests)
    reordered = [_reorder(messages, stable) for messages in requests]
    now, after = (_tokens(each, count) for each in (requests, reordered))
    advice = PromptAdvice(
        source=path.name,
        requests=len(requests),
        counted=count.name,
        tokens=sum(map(len, now)) / len(now),
        cached_now=cached(now) / len(now),
        cached_after=cached(after) / len(after),
        parts=_parts(requests, stable, count),
    )
    if len(lines) > _MOST_REQUESTS:
        advice.notes.append(f"the first {_MOST_REQUESTS} of {len(lines)} requests were compared")
    if len(requests) < 3:
        advice.notes.append("with fewer than three requests, what is stable is a guess")
    return advice


def _is_template(path: Path) -> bool:
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return False
    if path.suffix in (".jinja", ".jinja2", ".j2"):
        return True
    try:
        first = next((line for line in path.read_bytes().splitlines() if line.strip()), b"")
        return not isinstance(orjson.loads(first), dict)
    except OSError:
        return False  # reading it again says what is wrong
    except orjson.JSONDecodeError:
        return True


def cached(requests: Iterable[Tokens]) -> int:
    """Tokens in all that a prefix cache without a limit knows when these arrive one after the other.

    The last token of a prompt is always computed: somebody has to say what follows it.
    """
    known: set[int] = set()
    found = 0
    for tokens in requests:
        key, hitting = 0, True
        for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[begin : begin + BLOCK])))
            hitting = hitting and key in known and begin + BLOCK < len(tokens)
            found += BLOCK if hitting else 0
            known.add(key)
    return found


def pieces(text: str) -> list[str]:
    """Sentences and lines with the space behind them; joined they are ``text``."""
    return [piece for piece in re.split(r"(?<=\n)|(?<=[.!?]\s)", text) if piece]


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def _head(messages: list[Message]) -> int:
    """Messages up to the first user's: what comes behind is a conversation's own."""
    for number, message in enumerate(messages):
        if message.get("role") == "user":
            return number + 1
    return len(messages)


def _stable_texts(requests: list[list[Message]]) -> dict[tuple[str, str], float]:
    """(role, piece) to the share of requests that have it, in the order to write them."""
    counts: Counter[tuple[str, str]] = Counter()
    places: dict[tuple[str, str], list[float]] = {}
    for messages in requests:
        seen: set[tuple[str, str]] = set()
        for message in messages[: _head(messages)]:
            for place, piece in enumerate(pieces(_text(message))):
                key = (str(message.get("role")), piece)
                if key not in seen:
                    seen.add(key)
                    places.setdefault(key, []).append(place)
        counts.update(seen)
    share = {key: count / len(requests) for key, count in counts.items() if count >= 2}
    kept = [key for key, value in share.items() if value >= _STABLE_SHARE and key[1].strip()]

    def rank(key: tuple[str, str]) -> tuple[int, float]:
        often = next((n for n, least in enumerate(_OFTEN) if share[key] >= least), len(_OFTEN))
        return often, sum(places[key]) / len(places[key])

    return {key: share[key] for key in sorted(kept, key=rank)}


def _reorder(messages: list[Message], stable: dict[tuple[str, str], float]) -> list[Message]:
    """Stable text first in each message; what varies in earlier ones goes into the user's, behind it."""
    head = _head(messages)
    order = {key: number for number, key in enumerate(stable)}
    moved: list[Message] = []
    varying: list[str] = []
    for number, message in enumerate(messages[:head]):
        role = str(message.get("role"))
        found = pieces(_text(message))
        first = sorted((p for p in found if (role, p) in order), key=lambda p: order[role, p])
        varying += [p for p in found if (role, p) not in order]
        last = number == head - 1
        content = "".join([*first, *(varying if last else [])])
        if content or last:
            moved.append({**message, "content": content})
    return moved + messages[head:]


def _tokens(requests: list[list[Message]], count: Counting) -> list[Tokens]:
    return [count.tokens(count.render(messages)) for messages in requests]


def _parts(
    requests: list[list[Message]], stable: dict[tuple[str, str], float], count: Counting
) -> list[Part]:
    """The suggested order: stable pieces that stand together as one part each, then what varies, by role."""
    parts: list[Part] = []
    roles = list(
        dict.fromkeys(str(m.get("role")) for messages in requests for m in messages[: _head(messages)])
    )
    for role in sorted(roles, key=lambda role: role == "user"):
        for (owner, piece), share in stable.items():
            if owner != role:
                continue
            before = parts[-1] if parts and parts[-1].role == role else None
            if before is not None and abs(before.share - share) < 0.05:
                before.text += piece
            else:
                parts.append(Part(stable=True, role=role, text=piece, tokens=0, share=share))
    for part in parts:
        part.tokens = len(count.tokens(part.text))
    for role in sorted(roles, key=lambda role: role == "user"):
        varying = [
            "".join(p for m in messages[: _head(messages)] if str(m.get("role")) == role
                    for p in pieces(_text(m)) if (role, p) not in stable)
            for messages in requests
        ]  # fmt: skip
        with_text = [text for text in varying if text.strip()]
        if with_text:
            tokens = sum(len(count.tokens(text)) for text in with_text) / len(with_text)
            share = len(with_text) / len(requests)
            where = role if role == "user" or "user" not in roles else f"{role}, into the user's"
            parts.append(Part(stable=False, role=where, text=with_text[0], tokens=tokens, share=share))
    for part in parts:
        part.text = shortened(part.text)
    return parts


def shortened(text: str) -> str:
    """One line, with its end cut off if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
