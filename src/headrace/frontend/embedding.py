"""Texts to vectors: many requests of one caller, a bounded number of them in the engine at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace import errors
from headrace.engine.client import EngineClient
from headrace.engine.request import NOBODY, EngineOutput, EngineRequest, SamplingParams, Sender
from headrace.errors import GenerationError, HeadraceError, InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WINDOW = 64  # texts in the engine: enough for its next steps, and no caller fills the waiting line alone


class EmbeddingJob:
    """The texts of one call, under way. Thread-safe; ``done`` is called once, on any thread, at the end.

    ``outputs`` are then one per text, in order, unless ``error`` says what went wrong. ``embedded`` is told
    the index of each text that has its vector.
    """

    def __init__(
        self,
        client: EngineClient,
        inputs: Sequence[list[int]],
        done: Callable[[], None],
        *,
        request_id: str,
        sender: Sender = NOBODY,
        timeout_s: float | None = None,
        embedded: Callable[[int], None] | None = None,
    ) -> None:
        self.outputs: list[EngineOutput] = [EngineOutput(request_id="")] * len(inputs)
        self.error: HeadraceError | None = None
        self._client = client
        self._inputs = inputs
        self._done = done
        self._embedded = embedded
        self._request_id = request_id
        self._sender = sender
        self._params = SamplingParams(timeout_s=timeout_s)
        self._arrival = time.monotonic()
        self._lock = threading.Lock()
        self._waiting = deque(range(len(inputs)))  # not submitted yet
        self._running: set[int] = set()
        self._over = False

    def start(self) -> None:
        """Submit the first texts; the others follow as these end."""
        self._submit_more()

    def abort(self) -> None:
        """End what runs and submit no more; ``done`` is called if it has not been."""
        self._end(OverloadedError("the request was aborted"))

    def _submit_more(self) -> None:
        while True:
            with self._lock:
                if self._over or not self._waiting or len(self._running) >= _WINDOW:
                    return
                index = self._waiting.popleft()
                self._running.add(index)
            try:
                self._client.submit(self._request(index), partial(self._receive, index))
            except HeadraceError as error:
                with self._lock:
                    self._running.discard(index)
                    self._waiting.appendleft(index)
                    wait = isinstance(error, OverloadedError) and bool(self._running)
                if not wait:  # else one of ours will end, and this is called again
                    self._end(error)
                return

    def _request(self, index: int) -> EngineRequest:
        return EngineRequest(
            request_id=self._name(index),
            prompt_token_ids=self._inputs[index],
            params=self._params,
            priority=self._sender.priority,
            tenant=self._sender.tenant,
            tenant_weight=self._sender.tenant_weight,
            arrival_time=self._arrival,
            kind="embed",
        )

    def _name(self, index: int) -> str:
        return self._request_id if len(self._inputs) == 1 else f"{self._request_id}-{index}"

    def _receive(self, index: int, news: list[EngineOutput]) -> None:
        output = news[-1]
        with self._lock:
            self._running.discard(index)
            self.outputs[index] = output
            finished = not self._running and not self._waiting
        if output.vector is None:
            self._end(_failure(output))
            return
        if self._embedded is not None:
            self._embedded(index)
        if finished:
            self._end(None)
        else:
            self._submit_more()

    def _end(self, error: HeadraceError | None) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            self.error = error
            running = sorted(self._running)
        for index in running:
            self._client.abort(self._name(index))
        self._done()


def vector_of(output: EngineOutput, dimensions: int | None, *, normalize: bool) -> NDArray[np.float32]:
    """The output's vector; its first ``dimensions``, brought to length one again if the model does that."""
    import numpy as np

    vector = np.frombuffer(output.vector or b"", "<f4").astype(np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    vector = vector[:dimensions]
    if normalize:
        vector = vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))
    return vector


def check_dimensions(dimensions: int | None, available: int) -> None:
    """Raise InvalidRequestError unless a vector of ``available`` dimensions can be cut to ``dimensions``."""
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= available):
        raise InvalidRequestError(
            f"dimensions must be a whole number from 1 to {available}, which the model has.",
            param="dimensions",
        )


def _failure(output: EngineOutput) -> HeadraceError:
    if output.finish_reason == "abort":
        return OverloadedError("the server is shutting down and ended this request")
    kind = getattr(errors, output.error_kind or "", None)
    if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
        kind = GenerationError
    return kind(output.error_message or "the embedding failed")
