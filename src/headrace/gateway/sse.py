"""An upstream's event stream, cut anywhere by the network, as the whole events that a client may have."""

from __future__ import annotations

import time
from typing import Any

import orjson

from headrace.gateway.kinds import told_error
from headrace.gateway.usage import Usage, told

DONE = b"data: [DONE]\n\n"
_MAX_EVENT_BYTES = 4 * 2**20
_MAX_RECORD_BYTES = 2**20


class _BrokenError(Exception):
    """What came is no event stream of OpenAI's kind; the message says why."""


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk brings any of the answer, and not only its role."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


class EventFilter:
    """Feed it what arrives; it gives back what the client gets, byte for byte where nothing is to be removed.

    Every event's JSON is read once: that is cheaper than sending it, and what is broken never gets further.
    ``wants_usage``: the client asked for usage; else it is taken out. ``records``: keep what came, for the
    cache.
    """

    def __init__(self, *, wants_usage: bool, records: bool = False) -> None:
        self._wants_usage = wants_usage
        self._rest = b""
        self._open: set[int] = set()  # choices that have begun and not ended
        self._ended: set[int] = set()
        self._record: list[bytes] | None = [] if records else None
        self._record_bytes = 0
        self.usage: Usage | None = None
        self.first_token_at: float | None = None  # by time.monotonic
        self.chunks = 0  # events with content: about as many tokens
        self.done = False  # [DONE] has come
        self.error: str | None = None  # what the upstream said, or what is broken

    @property
    def complete(self) -> bool:
        """Whether every choice ended with a reason, and no error came."""
        return bool(self._ended) and not self._open and self.error is None

    def all_ended(self, choices: int) -> bool:
        """Whether so many choices are complete, so that nothing of worth can follow."""
        return self.complete and len(self._ended) >= choices

    @property
    def record(self) -> bytes | None:
        """All that came, in the upstream's words, if it was recorded and is complete."""
        if self._record is None or not self.complete:
            return None
        return b"".join([*self._record, DONE])

    def feed(self, data: bytes) -> bytes:
        """The events that ``data`` completes, up to what is broken, of which ``error`` then tells."""
        buffer = self._rest + data if self._rest else data
        if b"\r" in buffer:
            # a CR at the end may be the first half of CRLF: it waits for what comes next
            held = b"\r" if buffer.endswith(b"\r") else b""
            whole = buffer[:-1] if held else buffer
            buffer = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *blocks, self._rest = buffer.split(b"\n\n")
        out = []
        try:
            for block in blocks:
                if self.done or self.error is not None:
                    break
                out.append(self._event(block))
            if len(self._rest) > _MAX_EVENT_BYTES:
                raise _BrokenError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        except _BrokenError as error:
            self.error = f"the upstream's stream broke: {error}"
        return b"".join(out)

    def _event(self, block: bytes) -> bytes:
        if block.startswith(b"data: ") and b"\n" not in block:
            data = block[6:]
        else:
            lines = block.split(b"\n")
            fields = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
            if not fields:
                if any(line and not line.startswith((b":", b"event:", b"id:", b"retry:")) for line in lines):
                    raise _BrokenError("what came is no server-sent event")
                return b""  # a comment that keeps connections alive
            data = b"\n".join(fields)
        if data == b"[DONE]":
            self.done = True
            return b""
        return self._chunk(data)

    def _chunk(self, data: bytes) -> bytes:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise _BrokenError("an event is not JSON") from None
        if not isinstance(chunk, dict):
            raise _BrokenError("an event is not a JSON object")
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            error = told_error(data)
            if error is None:
                raise _BrokenError("an event has neither choices nor an error")
            self.error = error[0]
            return b""
        self._keep(data)
        for choice in choices:
            self._follow(choice)
        if choices:
            self.chunks += 1
        if "usage" not in chunk:
            return b"data: " + data + b"\n\n"
        self.usage = told(chunk["usage"]) or self.usage
        if self._wants_usage:
            return b"data: " + data + b"\n\n"
        if not choices:
            return b""
        del chunk["usage"]
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _follow(self, choice: Any) -> None:
        if not isinstance(choice, dict) or type(index := choice.get("index", 0)) is not int:
            raise _BrokenError("a choice is not as OpenAI's are")
        if self.first_token_at is None and _has_content(choice):
            self.first_token_at = time.monotonic()
        if choice.get("finish_reason") is not None:
            self._open.discard(index)
            self._ended.add(index)
        elif index not in self._ended:
            self._open.add(index)

    def _keep(self, data: bytes) -> None:
        if self._record is None:
            return
        self._record.append(b"data: " + data + b"\n\n")
        self._record_bytes += len(data)
        if self._record_bytes > _MAX_RECORD_BYTES:
            self._record = None
