"""ProcessClient: an engine in a process of its own, so that text and HTTP never share its interpreter."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import msgspec

from headrace.engine.build import EngineSpec
from headrace.engine.client import OutputSink
from headrace.engine.grammar import GrammarCompiler, Vocabulary
from headrace.engine.loop import Abort, News, Stop
from headrace.engine.request import EngineRequest, EngineStats
from headrace.engine.subscribers import Subscribers
from headrace.engine.wire import Channel, Failed, Ready
from headrace.errors import EngineDeadError, InvalidRequestError

_CLOSED = "The engine is closed."


class ProcessClient:
    """An EngineClient whose engine is built from ``spec`` by a child process. Sinks are called on a thread.

    The constructor returns when the engine is ready. Raises what building it raised, as the same class of
    HeadraceError; EngineDeadError if the child died of something else.
    """

    journal = None

    def __init__(self, spec: EngineSpec) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs)
            except OSError as error:
                ours.close()
                raise EngineDeadError(f"The engine's process could not be started: {error}.") from error
        self._channel = Channel(ours)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Ready | News | Failed).decode
        self._closing = False
        try:
            ready = self._first_answer(spec)
        except BaseException:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            raise
        self.architecture = ready.architecture
        self.capabilities = ready.capabilities
        self.max_model_len = ready.limits.max_model_len
        self._subscribers = Subscribers(ready.limits, self._send, self.abort)
        self._reader = threading.Thread(target=self._read, name="headrace-engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """See EngineClient.use_grammars. The engine's process makes a compiler of its own."""
        self._tell(compiler.vocabulary)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See EngineClient.submit."""
        self._subscribers.submit(request, sink)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineClient.abort."""
        self._tell(Abort(request_id, choice))

    def stats(self) -> EngineStats:
        """See EngineClient.stats."""
        return self._subscribers.stats

    def close(self, timeout_s: float = 5.0) -> None:
        """See EngineClient.close. A child that does not end within ``timeout_s`` is killed."""
        self._closing = True
        self._tell(Stop())
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join()  # it ends with the process; what the engine said last is delivered first
        self._subscribers.end_all(_CLOSED, finish_reason="abort")

    def _first_answer(self, spec: EngineSpec) -> Ready:
        try:
            self._channel.send(self._encode(spec))
            message = self._channel.receive()
        except OSError:
            message = None
        if message is None:
            raise EngineDeadError(f"The engine's process ended while loading ({self._exit()}).")
        answer = self._decode(message)
        if isinstance(answer, Failed):
            raise answer.as_error()
        if not isinstance(answer, Ready):
            raise EngineDeadError("The engine's process spoke out of turn.")
        return answer

    def _send(self, request: EngineRequest) -> None:
        try:
            self._channel.send(self._encode(request))
        except OSError as error:
            raise EngineDeadError(f"The engine's process is gone: {error}.") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"The request cannot be sent to the engine: {error}.") from error

    def _tell(self, command: Abort | Stop | Vocabulary) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, and everything has ended with it
            self._channel.send(self._encode(command))

    def _read(self) -> None:
        """Deliver news until the process ends, then end what is left."""
        why: str | None = None
        try:
            while (message := self._channel.receive()) is not None:
                answer = self._decode(message)
                if isinstance(answer, News):
                    self._subscribers.deliver(answer)
                elif isinstance(answer, Failed):
                    why = f"The engine died: {answer.message}"
        except Exception as error:  # what cannot be understood cannot be continued
            why = f"The engine's process cannot be understood: {error}."
            self._process.kill()
        finally:
            self._channel.close()
            if self._closing:
                self._subscribers.end_all(_CLOSED, finish_reason="abort")
            else:
                self._subscribers.end_all(
                    why or f"The engine's process died ({self._exit()}).", finish_reason="error"
                )

    def _exit(self) -> str:
        """How the process ended, which it has just done or is about to do."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the child with our import path; nothing of the parent's main module runs in it."""
    fd = theirs.fileno()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.engine.process_child", str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
