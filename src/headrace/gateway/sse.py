"""An upstream's event stream, cut anywhere by the network, as the whole events that a client may have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from headrace.gateway.kinds import Translation, error_in
from headrace.gateway.usage import Usage, as_told, told

if TYPE_CHECKING:
    from headrace.gateway.resume import Continuation, Progress

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
    """Feed it what arrives; it gives back what the client gets, byte for byte where nothing is to be changed.

    Every event's JSON is read once: that is cheaper than sending it, and what is broken never gets further.
    ``wants_usage``: the client asked for usage; else it is taken out. ``records``: keep what came, for the
    cache. ``progress``: keeps what was told, so that the stream may go on elsewhere. ``translate``: what the
    events are first to be put through.
    """

    def __init__(
        self,
        *,
        wants_usage: bool,
        records: bool = False,
        progress: Progress | None = None,
        translate: Translation | None = None,
    ) -> None:
        self._wants_usage = wants_usage
        self._progress = progress
        self._translate = translate
        self._rest = b""
        self._open: set[int] = set()  # choices that have begun and not ended
        self._ended: set[int] = set()
        self._record: list[bytes] | None = [] if records else None
        self._record_bytes = 0
        self._told_tokens = 0  # by upstreams before this one, and in the prompt of this one
        self.resumed = False
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
    def any_ended(self) -> bool:
        """Whether a choice ended with a reason: then there is nothing to go on with."""
        return bool(self._ended)

    @property
    def num_tokens(self) -> int:
        """Tokens that came, as far as can be told."""
        return (self._progress and self._progress.num_tokens) or self.chunks

    @property
    def record(self) -> bytes | None:
        """All that came, usage included, if it was recorded and is complete."""
        if self._record is None or not self.complete:
            return None
        return b"".join([*self._record, DONE])

    def go_on(self, how: Continuation, translate: Translation | None) -> None:
        """What is fed from now on is another upstream's stream, which continues what came."""
        assert self._progress is not None
        self._translate = translate
        self._rest, self.done, self.error, self.usage = b"", False, None, None
        self._told_tokens = how.told_tokens
        self.resumed = True
        if how.how == "text":
            self._record = self._progress.token_ids = None

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
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise _BrokenError("an event is not JSON") from None
        if not isinstance(event, dict):
            raise _BrokenError("an event is not a JSON object")
        if self._translate is None:
            return self._chunk(event, data)
        try:
            chunks = self._translate(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _BrokenError("an event is not as its kind of upstream writes them") from None
        return b"".join(self._chunk(chunk, None) for chunk in chunks)

    def _chunk(self, chunk: dict[str, Any], data: bytes | None) -> bytes:
        """A chunk as the client gets it. ``data``: its JSON, if it came as it is."""
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            error = error_in(chunk)
            if error is None:
                raise _BrokenError("an event has neither choices nor an error")
            self.error = error[0]
            return b""
        for choice in choices:
            self._follow(choice)
        if choices:
            self.chunks += 1
        if self._progress is not None and self._changed(chunk, self._progress):
            data = None
            if choices and not chunk["choices"]:
                return b""
        if "usage" not in chunk:
            return self._told(data or orjson.dumps(chunk))
        usage = told(chunk["usage"])
        if usage is not None and self._told_tokens:
            usage = usage.with_told(self._told_tokens)
            chunk["usage"], data = as_told(usage), None
        self.usage = usage or self.usage
        data = data or orjson.dumps(chunk)
        self._keep(data)
        if self._wants_usage:
            return b"data: " + data + b"\n\n"
        if not choices:
            return b""
        del chunk["usage"]
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _changed(self, chunk: dict[str, Any], progress: Progress) -> bool:
        """Note what is told, and fit it into what was told before. A chunk without news loses its choices."""
        if not self.resumed:
            return progress.note(chunk)
        has_news = progress.fit(chunk)
        progress.note(chunk)
        if not has_news:
            chunk["choices"] = []
        return True

    def _told(self, data: bytes) -> bytes:
        self._keep(data)
        return b"data: " + data + b"\n\n"

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
