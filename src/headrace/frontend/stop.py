"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several strings in text that comes in pieces.

    The match that *ends* first wins, the longest among those that end together: so the outcome does not
    depend on how the text was cut into pieces. Each character costs amortised constant time per stop
    string (Knuth, Morris and Pratt, 1977).
    """

    __slots__ = ("_failures", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: none of them empty."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # characters of each stop string that the text now ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string if one was found.

        Text that may still turn out to be the beginning of a stop string is held back. After a match the
        text before it has been returned; nothing may be pushed any more.
        """
        if not self._stops:
            return text, None
        states = self._states
        for position, character in enumerate(text):
            for index, stop in enumerate(self._stops):
                failure, state = self._failures[index], states[index]
                while state and stop[state] != character:
                    state = failure[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    before = self._held + text[: position + 1]
                    return before[: len(before) - len(stop)], stop
                states[index] = state
        pending = max(states)
        text = self._held + text
        cut = len(text) - pending
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
