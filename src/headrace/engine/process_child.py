"""The program of an engine process: ``python -m headrace.engine.process_child FD``, FD being a socket.

Reads an EngineSpec, answers Ready or Failed, then takes commands and sends News. It lives as long as its
parent holds the other end: the socket's end of file ends the process, whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from headrace.engine.build import EngineSpec
from headrace.engine.intake import Intake, Message
from headrace.engine.loop import EngineLoop, News
from headrace.engine.memory import trim_memory
from headrace.engine.wire import Channel, Failed, Ready


def main(fd: int) -> NoReturn:
    """Serve the parent on socket ``fd``; never returns."""
    # The parent decides when to end, also when a terminal or a supervisor signals the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    encode = msgspec.msgpack.Encoder().encode
    try:
        first = channel.receive()
        if first is None:
            os._exit(0)
        engine = msgspec.msgpack.decode(first, type=EngineSpec).build()
        trim_memory()
    except BaseException as error:
        channel.send(encode(Failed.of(error)))
        os._exit(1)

    def send(news: News) -> None:
        channel.send(encode(news))

    def end(error: BaseException | None) -> None:
        try:
            if error is not None:
                channel.send(encode(Failed.of(error)))
        finally:
            sys.stderr.flush()
            os._exit(
                0 if error is None else 1
            )  # the main thread waits for messages; it must not delay the end

    loop = EngineLoop(engine, send, end)
    channel.send(encode(Ready(engine.runner.architecture, engine.runner.capabilities, engine.limits)))
    loop.start()
    intake = Intake(loop)
    decode = msgspec.msgpack.Decoder(Message).decode
    while (message := channel.receive()) is not None:
        intake.take(decode(message))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
