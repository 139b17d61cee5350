"""What is asked: conversations by number, the same ones for the same seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from headrace.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user adds to a conversation, and the longest answer in tokens."""

    messages: list[Message]
    max_tokens: int


class Workload(Protocol):
    """Conversations without end.

    ``hash`` is equal exactly when all conversations are. ``fixed_length``: answers should be as long as
    asked, not end where the model would. ``turns`` is the most that a conversation has.
    """

    name: str
    hash: str
    fixed_length: bool
    turns: int

    def conversation(self, stage: int, number: int) -> list[Turn]:
        """Conversation ``number`` of a stage; negative numbers are for warming up. Stages share none."""
        ...


class Listed:
    """Conversations of one turn from a list, in its order, from the beginning again after its end."""

    turns = 1

    def __init__(self, name: str, asked: list[Turn]) -> None:
        self.name = name
        self.fixed_length = False
        self._asked = asked
        self.hash = workload_hash([[turn.messages, turn.max_tokens] for turn in asked])

    def __len__(self) -> int:
        return len(self._asked)

    def conversation(self, stage: int, number: int) -> list[Turn]:
        """Stages begin at different places, as far as there are any."""
        begin = stage * max(len(self._asked) // 8, 1)
        return [self._asked[(begin + number) % len(self._asked)]]


def workload_hash(content: object) -> str:
    """A short hash of anything that JSON can write."""
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def read_prompts(path: Path, max_tokens: int) -> Listed:
    """A JSON Lines file: ``{"prompt": "…"}`` or ``{"messages": […]}`` a line, ``max_tokens`` optional.

    Raises ConfigError that names the line.
    """
    return Listed(path.name, [turn_of(value, where, max_tokens) for value, where in json_lines(path)])


def json_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The objects of a JSON Lines file, each with ``file:line``; skips empty lines. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f'{where}: a line is one JSON object such as {{"prompt": "Hello!"}}')
        found.append((value, where))
    if not found:
        raise ConfigError(f"{path} is empty: it needs at least one line with a prompt")
    return found


def turn_of(value: dict[str, Any], where: str, default_tokens: int) -> Turn:
    """A request as a line of a file writes it. Raises ConfigError that names ``where``."""
    limit = value.get("max_tokens", value.get("max_completion_tokens", default_tokens))
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(f"{where}: `max_tokens` is {limit!r}; it must be a whole number of 1 or more")
    prompt, messages = value.get("prompt"), value.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where}: a line needs either `prompt` or `messages`")
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{where}: `prompt` must be a text that is not empty")
        return Turn([{"role": "user", "content": prompt}], limit)
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: `messages` must be a list that is not empty")
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise ConfigError(f"{where}: every message needs `role` and `content`")
    return Turn(messages, limit)
