"""A recorded load, replayed: who asked when, and either what or how much."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.lab.bench.synthetic import Synthetic
from headrace.lab.bench.workload import Turn, json_lines, turn_of, workload_hash


class Trace:
    """A JSON Lines file with a ``timestamp`` a line: seconds as a number, or an ISO 8601 time.

    What was asked stands beside it as ``prompt`` or ``messages``, or only its size as ``prompt_tokens`` and
    ``output_tokens`` (``input_length``, ``output_length`` are understood too): then ``filler`` makes a prompt
    of that size. ``speed`` 2 replays twice as fast. Times count from the first line's.
    """

    turns = 1

    def __init__(self, path: Path, filler: Synthetic, *, max_tokens: int, speed: float = 1.0) -> None:
        lines = json_lines(path)
        self.name = path.name
        self._filler = filler
        self._asked: list[Turn | tuple[int, int]] = [
            _asked(value, where, max_tokens) for value, where in lines
        ]
        times = [_seconds(value, where) for value, where in lines]
        for (_, where), before, after in zip(lines[1:], times, times[1:], strict=False):
            if after < before:
                raise ConfigError(
                    f"{where}: this line's `timestamp` is before the line's above; sort the file"
                )
        self.times = [(at - times[0]) / speed for at in times]
        self.fixed_length = any(isinstance(asked, tuple) for asked in self._asked)
        sizes = [a if isinstance(a, tuple) else (a.messages, a.max_tokens) for a in self._asked]
        self.hash = workload_hash([sizes, self.times, filler.hash])

    def conversation(self, stage: int, number: int) -> list[Turn]:
        """The line ``number``; warm-up has negative ones and takes lines from the end."""
        asked = self._asked[number % len(self._asked)]
        if isinstance(asked, Turn):
            return [asked]
        return self._filler.opening(stage, number, *asked)


def _seconds(value: dict[str, Any], where: str) -> float:
    at = value.get("timestamp")
    if isinstance(at, str):
        try:
            return datetime.datetime.fromisoformat(at).timestamp()
        except ValueError:
            pass
    elif isinstance(at, int | float) and not isinstance(at, bool):
        return float(at)
    raise ConfigError(f"{where}: `timestamp` is {at!r}; it must be a number of seconds or an ISO 8601 time")


def _asked(value: dict[str, Any], where: str, max_tokens: int) -> Turn | tuple[int, int]:
    if "prompt" in value or "messages" in value:
        return turn_of(value, where, max_tokens)
    sizes = []
    for names in (("prompt_tokens", "input_length"), ("output_tokens", "output_length")):
        size = next((value[name] for name in names if name in value), None)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"{where}: needs `prompt`, `messages`, or `prompt_tokens` and `output_tokens` ≥ 1"
            )
        sizes.append(size)
    return sizes[0], sizes[1]
