"""Reading one tool call, a JSON object with a name and arguments, while it is being written."""

from __future__ import annotations

import json
from collections.abc import Collection

_ARGUMENTS_KEYS = ("arguments", "parameters")
_MAX_NAME = 256  # characters; a longer "name" is no call
_MAX_DEPTH = 256


class CallScanner:
    """Takes an object's characters as they come and gives the arguments on as they stand.

    ``name`` once known; ``broken`` if it is no call of ``names`` after all; ``done`` with the closing brace.
    Arguments that come before the name are held back until it is there; a string of JSON for arguments is
    unwrapped.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.done = False
        self.broken = False
        self.raw = ""  # all that was read
        self._fresh = ""  # arguments that take() has not given yet
        self._has_arguments = False
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._expects = "key"  # at depth one: key, colon, value, comma
        self._key = ""
        self._token = ""  # of the key or value being read at depth one
        self._streams = False  # the value being read is arguments, given on as it comes

    def push(self, text: str) -> int:
        """Read on; returns how many characters belong to the object, fewer than all if it ends or breaks."""
        for index, char in enumerate(text):
            self._read(char)
            if self.broken:
                return index
            self.raw += char
            if self.done:
                return index + 1
        return len(text)

    def take(self) -> str:
        """The arguments that are new, once the name is known."""
        if self.name is None:
            return ""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def _read(self, char: str) -> None:
        if not self._closers:
            self.broken = char != "{"
            self._closers.append("}")
        elif self._in_string:
            self._read_in_string(char)
        elif len(self._closers) > 1:
            self._read_nested(char)
        else:
            self._read_top(char)

    def _read_in_string(self, char: str) -> None:
        self._keep(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if len(self._closers) == 1:
                self._end_of_string()
        elif len(self._closers) == 1 and len(self._token) > _MAX_NAME and not self._is_arguments():
            self.broken = True

    def _read_nested(self, char: str) -> None:
        self.broken = char in "}]" and char != self._closers[-1]
        if self.broken:
            return
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._closers.pop()
            if len(self._closers) == 1:
                self._end_of_value()

    def _read_top(self, char: str) -> None:
        """Between the braces of the call itself, outside strings."""
        if self._expects == "scalar" and (char in ",}" or char.isspace()):
            self._end_of_value()
        if char.isspace():
            return
        if char == "}" and self._expects in ("comma", "key"):
            self._finish()
        elif char == "," and self._expects == "comma":
            self._expects = "key"
        elif char == ":" and self._expects == "colon":
            self._expects = "value"
        elif char == '"' and self._expects in ("key", "value"):
            self._in_string = True
            self._token = ""
            self._streams = False
            self._keep(char)
        elif char in "{[" and self._expects == "value":
            self._token = ""
            self._streams = char == "{" and self._is_arguments()
            self._open(char)
            self._keep(char)
        elif self._expects in ("value", "scalar") and char not in '"{}[],:':
            self._token = "" if self._expects == "value" else self._token
            self._expects, self._streams = "scalar", False
            self._keep(char)
        else:
            self.broken = True

    def _open(self, char: str) -> None:
        self._closers.append("}" if char == "{" else "]")
        self.broken = len(self._closers) > _MAX_DEPTH

    def _is_arguments(self) -> bool:
        return self._expects != "key" and self._key in _ARGUMENTS_KEYS and not self._has_arguments

    def _keep(self, char: str) -> None:
        if self._streams:
            self._fresh += char
        elif len(self._closers) == 1 or self._key == "name" or self._is_arguments():
            self._token += char

    def _end_of_string(self) -> None:
        try:
            value = json.loads(self._token)
        except ValueError:
            self.broken = True
            return
        if self._expects == "key":
            self._key, self._expects = value, "colon"
            return
        if self._key == "name" and self.name is None:
            self.broken = value not in self._names
            self.name = None if self.broken else value
        self._token = str(value)
        self._end_of_value()

    def _end_of_value(self) -> None:
        if self._is_arguments():
            if not self._streams:
                self._fresh += "{}" if self._token in ("null", "") else self._token
            self._has_arguments = True
        elif self._key == "name" and self.name is None:
            self.broken = True  # a name that is no string
        self._expects, self._streams = "comma", False

    def _finish(self) -> None:
        self.done = True
        self.broken = self.name is None
        if not self._has_arguments:
            self._fresh += "{}"
