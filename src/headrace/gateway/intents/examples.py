"""Labelled examples: JSON Lines of texts, their intents and, if known, how difficult they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from headrace.errors import ConfigError

INTENTS = ("chat", "summarise", "classify", "extract", "code", "maths", "reasoning", "creative")
"""Those of the shipped classifier; one of your own may have others."""

INTENT = re.compile(r"[a-z][a-z0-9_-]{0,31}")
"""What an intent may be called: its name goes into headers and metrics."""

_MOST_BYTES = 256 * 2**20
_MOST_TEXT = 1_000_000
_FIELDS = {"text", "intent", "difficulty", "group"}


@dataclass(frozen=True, slots=True)
class Example:
    """A text as a user sends it. ``difficulty``: 0 (anybody can) to 1, None if nobody said.

    ``group``: examples of one origin, such as a template; a split never parts them.
    """

    text: str
    intent: str
    difficulty: float | None = None
    group: str = ""


def read_examples(path: Path) -> list[Example]:
    """The examples of a file. Raises ConfigError that names the line of a mistake."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is over {_MOST_BYTES >> 20} MiB; a few thousand examples are enough")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines = enumerate(data.split(b"\n"), 1)
    found = [_example(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not found:
        raise ConfigError(f'{path} has no examples; a line is like {{"text": "Hello!", "intent": "chat"}}')
    return found


def shipped(name: str) -> Path:
    """Where a labelled file of ours lies: ``training.jsonl`` or ``held-out.jsonl``."""
    return Path(str(resources.files("headrace.gateway.intents") / name))


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Those to train on, and about ``share`` of every intent's held out; groups stay whole.

    Which groups are held out depends on their names and ``seed`` only, not on the order of the file.
    """
    held: set[str] = set()
    for intent in sorted({example.intent for example in examples}):
        sizes: dict[str, int] = {}
        for example in examples:
            if example.intent == intent:
                key = _origin(example)
                sizes[key] = sizes.get(key, 0) + 1
        wanted = share * sum(sizes.values())
        for key in sorted(sizes, key=lambda key: _shuffled(key, seed)):
            if sizes[key] / 2 <= wanted:  # nearer to what is wanted with it than without
                held.add(key)
                wanted -= sizes[key]
    kept = [example for example in examples if _origin(example) not in held]
    return kept, [example for example in examples if _origin(example) in held]


def folds(examples: Sequence[Example], count: int, seed: int) -> list[int]:
    """The fold, 0 to ``count`` - 1, of every example; groups stay whole."""
    keys = sorted({_origin(example) for example in examples}, key=lambda key: _shuffled(key, seed))
    number = {key: at % count for at, key in enumerate(keys)}
    return [number[_origin(example)] for example in examples]


def _origin(example: Example) -> str:
    return example.group or example.text


def _shuffled(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _example(line: bytes, where: str) -> Example:
    try:
        read: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: this is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f'{where}: an object is needed, like {{"text": "Hello!", "intent": "chat"}}')
    if unknown := sorted(read.keys() - _FIELDS):
        raise ConfigError(f"{where}: {unknown[0]!r} is no field; there are {', '.join(sorted(_FIELDS))}")
    text, intent = read.get("text"), read.get("intent")
    if not isinstance(text, str) or not text.strip() or len(text) > _MOST_TEXT:
        raise ConfigError(f"{where}: text: a string of 1 to {_MOST_TEXT} characters is needed")
    if not isinstance(intent, str) or not INTENT.fullmatch(intent):
        raise ConfigError(f"{where}: intent: a lower-case word like {', '.join(INTENTS)} is needed")
    difficulty, group = read.get("difficulty"), read.get("group", "")
    if difficulty is not None:
        number = isinstance(difficulty, int | float) and not isinstance(difficulty, bool)
        if not number or not 0 <= difficulty <= 1:
            raise ConfigError(f"{where}: difficulty: a number from 0 to 1")
        difficulty = float(difficulty)
    if not isinstance(group, str) or len(group) > 200:
        raise ConfigError(f"{where}: group: a short string")
    return Example(text, intent, difficulty, group)
