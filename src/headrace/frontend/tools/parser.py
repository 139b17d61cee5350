"""From an output's text to content and tool calls, as it comes."""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.frontend.tools.call_scanner import CallScanner
from headrace.frontend.tools.formats import ToolFormat

_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class CallDelta:
    """News of one call: ``id`` and ``name`` the first time, then more of the arguments (a string of JSON)."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be. At most one delta for each call."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def call(self, index: int) -> CallDelta:
        """The delta of call ``index``, made if it is not there yet."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        return self.calls[-1]


class ToolParser:
    """Reads one choice's output. Whatever pieces it comes in, joined deltas are the same.

    What begins like a call but is none, or calls none of the functions ``names``, stays content; white space
    around calls is dropped. ``parallel``: False keeps the first call only. ``seed``: what the ids of calls
    are made of, so that one who reads the output again gives the same ones; None: random ids.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], *, parallel: bool = True, seed: str | None = None
    ) -> None:
        self.num_calls = 0
        self._seed = os.urandom(12).hex() if seed is None else seed
        self._form = form
        self._names = names
        self._parallel = parallel
        self._state = "text" if form.begin else "start"
        self._buffer = ""
        self._block = ""  # the text of a block in which no call was found yet
        self._held = ""  # white space that is content only if text follows
        self._scanner: CallScanner | None = None
        self._announced = False  # whether the scanner's call has been

    def push(self, text: str) -> Parsed:
        """Read on."""
        self._buffer += text
        out = Parsed()
        while self._buffer and self._advance(out, ending=False):
            pass
        return out

    def finish(self) -> Parsed:
        """The output has ended: what was held back is content."""
        out = Parsed()
        while self._buffer and self._advance(out, ending=True):
            pass
        if self._scanner is not None and not self._announced:
            self._content(out, self._block + self._scanner.raw)
        elif self._state == "gap" and not self.num_calls:
            self._content(out, self._block)
        if not self.num_calls:
            out.content += self._held
        self._held = ""
        return out

    def _advance(self, out: Parsed, *, ending: bool) -> bool:
        """One step through the buffer; False if more text is needed first."""
        if self._state == "text":
            return self._in_text(out, ending)
        if self._state == "start":
            return self._at_start(ending)
        if self._state == "gap":
            return self._in_gap(out, ending)
        return self._in_call(out)

    def _in_text(self, out: Parsed, ending: bool) -> bool:
        begin = self._form.begin
        at = self._buffer.find(begin) if begin else -1
        if at >= 0:
            self._content(out, self._buffer[:at])
            self._buffer = self._buffer[at + len(begin) :]
            self._block, self._state = begin, "gap"
            return True
        kept = 0 if ending else _beginning(self._buffer, begin)
        shown = len(self._buffer) - kept
        self._content(out, self._buffer[:shown])
        self._buffer = self._buffer[shown:]
        return False

    def _at_start(self, ending: bool) -> bool:
        """Where calls have no mark of their own: they are what the output begins with."""
        rest = self._buffer.lstrip()
        mark = self._form.optional_begin
        if mark and rest.startswith(mark):
            self._block = self._buffer[: len(self._buffer) - len(rest)] + mark
            self._buffer, self._state = rest.removeprefix(mark), "gap"
        elif rest.startswith("{"):
            self._state = "gap"
        elif not ending and (not rest or mark.startswith(rest)):
            return False
        else:
            self._state = "text"
        return True

    def _in_gap(self, out: Parsed, ending: bool) -> bool:
        """In a block, outside calls."""
        form = self._form
        rest = self._buffer.lstrip(" \n\r\t" + (form.opening + form.separator).strip())
        self._block += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._scanner, self._announced, self._state = CallScanner(self._names), False, "call"
            return True
        finish = form.end or form.closing.strip()
        if finish and rest.startswith(finish):
            self._block += finish
            self._buffer = rest[len(finish) :]
        elif finish.startswith(rest) and not ending:
            return False
        if not self.num_calls:  # an empty block is no call
            self._content(out, self._block)
        self._block, self._state = "", "text"
        return True

    def _in_call(self, out: Parsed) -> bool:
        scanner = self._scanner
        assert scanner is not None
        taken = scanner.push(self._buffer)
        self._buffer = self._buffer[taken:]
        wanted = self._parallel or self.num_calls == 0 or (self._announced and self.num_calls == 1)
        if scanner.name is not None and wanted:
            if not self._announced:
                self._announced, self._held = True, ""
                delta = out.call(self.num_calls)
                delta.id, delta.name = self._new_id(), scanner.name
                self.num_calls += 1
            if fresh := scanner.take():
                out.call(self.num_calls - 1).arguments += fresh
        if scanner.broken:
            if not self._announced and wanted:
                self._content(out, self._block + scanner.raw)
            self._scanner, self._block, self._state = None, "", "text"
        elif scanner.done:
            self._scanner, self._block, self._state = None, "", "gap"
        return bool(self._buffer)

    def _content(self, out: Parsed, text: str) -> None:
        """Text that is content; white space waits for what follows."""
        stripped = text.rstrip()
        if not stripped:
            self._held += text
            return
        out.content += self._held + stripped
        self._held = text[len(stripped) :]

    def _new_id(self) -> str:
        digest = hashlib.sha256(f"{self._seed} {self.num_calls}".encode()).digest()
        if self._form.short_ids:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
        return f"call_{digest[:12].hex()}"


def _beginning(text: str, mark: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
