"""How engine and client speak across processes: msgpack messages over a socket, and what they say."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgspec

from headrace import errors
from headrace.backend.runner import Capabilities
from headrace.engine.validate import EngineLimits
from headrace.model.architecture import Architecture

MAX_MESSAGE_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, tag="ready"):
    """First message of an engine that has loaded."""

    architecture: Architecture
    capabilities: Capabilities
    limits: EngineLimits


class Failed(msgspec.Struct, tag="failed"):
    """Last message of an engine that could not load, or died. ``kind``: class name of the error."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Describe ``error``."""
        if isinstance(error, errors.HeadraceError):
            return cls(type(error).__name__, error.message, error.param)
        return cls(type(error).__name__, f"{type(error).__name__}: {error}")

    def as_error(self) -> errors.HeadraceError:
        """The same error on this side; EngineDeadError for one that is not headrace's own."""
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, errors.HeadraceError):
            return found(self.message, param=self.param)
        return errors.EngineDeadError(f"The engine failed: {self.message}")


class Channel:
    """Whole messages over a stream socket: four bytes of length (little-endian), then the message."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send one message. Any thread. Raises OSError if the other side is gone, ValueError if too long."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message, or None when the other side is gone. One thread. Raises ValueError for a lie."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message claims {length} bytes, over the limit of {MAX_MESSAGE_BYTES}")
        return self._exactly(length)

    def close(self) -> None:
        """End the conversation: both sides' receive returns None."""
        with contextlib.suppress(OSError):  # the other side may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._send_lock:  # a sender in the middle of a message fails first: its descriptor stays its own
            self._socket.close()

    def _exactly(self, count: int) -> bytes | None:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                received = self._socket.recv_into(view)
            except OSError:
                return None
            if received == 0:
                return None
            view = view[received:]
        return bytes(buffer)
