"""Messages between processes: whole, bounded, and an end when the other side is gone."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from headrace.engine.wire import MAX_MESSAGE_BYTES, Channel, Failed
from headrace.errors import ContextLengthError, EngineDeadError


def test_messages_arrive_whole() -> None:
    """A message larger than the socket's buffer arrived in pieces that were read as messages."""
    left, right = socket.socketpair()
    sender, receiver = Channel(left), Channel(right)
    messages = [b"", b"x", bytes(3_000_000), b"end"]
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    assert [receiver.receive() for _ in messages] == messages
    thread.join()
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_a_lying_length_is_refused() -> None:
    """Four bytes of rubbish made the reader allocate four gigabytes."""
    left, right = socket.socketpair()
    left.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ValueError, match="limit"):
        Channel(right).receive()
    left.close()
    right.close()


def test_a_message_cut_short_is_the_end() -> None:
    """The process died in the middle of a message, and the reader waited for its rest."""
    left, right = socket.socketpair()
    left.sendall(struct.pack("<I", 100) + b"only this")
    left.close()
    channel = Channel(right)
    assert channel.receive() is None
    channel.close()


def test_errors_keep_their_class() -> None:
    """An error's class decides the HTTP status; a foreign one must not pick a class by its name."""
    error = Failed.of(ContextLengthError("too long", param="prompt")).as_error()
    assert (type(error), error.message, error.param) == (ContextLengthError, "too long", "prompt")
    assert type(Failed.of(MemoryError("no")).as_error()) is EngineDeadError
    assert type(Failed("annotations", "a module's attribute").as_error()) is EngineDeadError
