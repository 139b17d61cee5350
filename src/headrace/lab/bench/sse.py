"""Server-sent events out of a byte stream that may be cut anywhere."""

from __future__ import annotations

from headrace.errors import HeadraceError

MAX_EVENT_BYTES = 16 * 2**20


class EventTooLongError(HeadraceError):
    """An event without an end: whatever is sent, it is no event stream."""


class EventParser:
    """Feed it what arrives; it gives back the data of the events that are complete.

    Follows the WHATWG definition for ``data`` fields: lines end in LF, CRLF or CR, an empty line ends an
    event, several ``data`` lines are joined by LF, other fields and comments are passed over. One departure:
    the last event counts even if the stream ends before its empty line (:meth:`finish`).
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # an unfinished line, in the pieces that came
        self._data: list[bytes] = []
        self._size = 0
        self._first = True

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that ``received`` completes. Raises EventTooLongError."""
        self._rest.append(received)
        if b"\n" not in received and b"\r" not in received and not self._rest[0].endswith(b"\r"):
            self._check_size()
            return []
        buffer = b"".join(self._rest) if len(self._rest) > 1 else received
        if self._first and len(buffer) >= 3:
            self._first = False
            buffer = buffer.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in buffer:
            # A CR at the end may be the first half of CRLF: it waits for what comes next.
            held = buffer.endswith(b"\r")
            whole = buffer[:-1] if held else buffer
            buffer = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *lines, rest = buffer.split(b"\n")
        self._rest = [rest] if rest else []
        events = [event for line in lines if (event := self._line(line)) is not None]
        self._check_size()
        return events

    def finish(self) -> list[bytes]:
        """The data of an event that the end of the stream completes."""
        rest, self._rest = b"".join(self._rest).rstrip(b"\r"), []
        return [event for line in (rest, b"") if (event := self._line(line)) is not None]

    def _check_size(self) -> None:
        if self._size + sum(map(len, self._rest)) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event is longer than {MAX_EVENT_BYTES} bytes")

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            if not self._data:
                return None
            event = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data, self._size = [], 0
            return event
        if line.startswith(b"data:"):
            value = line[6:] if line.startswith(b"data: ") else line[5:]
            self._data.append(value)
            self._size += len(value)
        elif line == b"data":
            self._data.append(b"")
        return None
