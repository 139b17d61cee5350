"""One HTTP request's generation: a stream per prompt, merged, checked and accounted for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.request import NOBODY, SamplingParams, Sender
from headrace.errors import OverloadedError
from headrace.frontend.beam_search import BeamSearchParams
from headrace.frontend.beam_stream import BeamStream
from headrace.frontend.outputs import TextOutput
from headrace.server.responses import PromptTokensDetails, Usage
from headrace.server.state import ServerState, error_of_kind

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend
    from headrace.frontend.stream import TextStream

_MERGE_LIMIT = 64  # lists of outputs that wait for a slow client before its pumps do


class Outputs(Protocol):
    """What an answer is written from: lists of outputs, and the usage so far."""

    def __aiter__(self) -> AsyncIterator[list[TextOutput]]: ...

    def settle(self) -> Usage: ...

    async def aclose(self) -> None: ...

    def collected(self) -> None: ...


class Generation:
    """The sequences of one HTTP request: ``n`` for every prompt, choice ``prompt * n + i``.

    Iterate for lists of outputs; ``error`` and ``abort`` are raised as the HeadraceError they stand for.
    ``aclose`` ends whatever still runs, and must always be called.
    """

    def __init__(
        self, state: ServerState, frontend: Frontend, request_id: str, line: dict[str, Any] | None = None
    ) -> None:
        self.usage = Usage()
        self._state = state
        self._frontend = frontend
        self._request_id = request_id
        self._line: dict[str, Any] = line if line is not None else {}
        self._n = 1
        self._streams: list[TextStream | BeamStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._outputs: AsyncIterator[list[TextOutput]] | None = None
        self._waiting: list[TextOutput] | None = None  # what first() has taken
        self._arrival = time.monotonic()
        self._last_output: dict[int, float] = {}  # by running choice
        self._first_token: float | None = None  # when it was here, not when the engine had it
        self._timed: set[int] = set()  # prompts whose queue and prefill times are recorded
        self._cached: dict[int, int] = {}  # by prompt
        self._tokens: dict[int, int] = {}  # by choice
        self._closed = False
        self.told: TextOutput | None = None  # of the only answer, by another server
        state.enter()

    async def start(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        sender: Sender = NOBODY,
        beams: BeamSearchParams | None = None,
        resumed: list[int] | None = None,
        notes: list[bytes] | None = None,
    ) -> None:
        """Submit all prompts; with ``beams``, the ``n`` best answers are searched instead of sampled.

        ``resumed``: tokens of the only answer, which goes on behind them. They count as its own in the usage.
        ``notes``: one for each prompt, that a journal keeps with it; a search is not kept.
        Raises what the frontend raises, with nothing left running after aclose.
        """
        self._n = params.n
        if resumed:
            self.told, self._tokens[0] = TextOutput(0, token_ids=resumed), len(resumed)
        self.usage.prompt_tokens = sum(map(len, prompts))
        for number, prompt in enumerate(prompts):
            name = self._request_id if len(prompts) == 1 else f"{self._request_id}-{number}"
            note = notes[number] if notes else b""
            stream = await self._stream(prompt, params, name, sender, beams, note)
            self._streams.append(stream)
            self._last_output.update(dict.fromkeys(range(number * self._n, (number + 1) * self._n), 0.0))
        self._outputs = self._merged()

    async def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        name: str,
        sender: Sender,
        beams: BeamSearchParams | None,
        note: bytes,
    ) -> TextStream | BeamStream:
        if beams is None:
            told: list[int] = [] if self.told is None else self.told.token_ids
            begun = await self._frontend.start(
                prompt, params, request_id=name, sender=sender, output_token_ids=told, note=note
            )
            if self.told is not None:
                self.told.text = begun.told
            return begun
        self._frontend.check(prompt, params)
        return BeamStream(
            self._frontend,
            prompt,
            beams,
            n=params.n,
            request_id=name,
            sender=sender,
            timeout_s=params.timeout_s,
        )

    async def first(self) -> None:
        """Wait for the first outputs, so that what fails before them is still an HTTP error."""
        self._waiting = await self._next()

    def __aiter__(self) -> AsyncIterator[list[TextOutput]]:
        return self

    async def __anext__(self) -> list[TextOutput]:
        outputs, self._waiting = self._waiting or await self._next(), None
        return outputs

    async def _next(self) -> list[TextOutput]:
        assert self._outputs is not None, "start() comes first"
        outputs = await anext(self._outputs)
        now = time.monotonic()
        for output in outputs:
            self._account(output, now)
        return outputs

    async def _merged(self) -> AsyncIterator[list[TextOutput]]:
        if len(self._streams) == 1:
            async for outputs in self._streams[0]:
                yield outputs
            return
        queue: asyncio.Queue[list[TextOutput] | BaseException | None] = asyncio.Queue(_MERGE_LIMIT)
        self._pumps = [
            asyncio.create_task(self._pump(number, stream, queue))
            for number, stream in enumerate(self._streams)
        ]
        running = len(self._pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    async def _pump(
        self,
        number: int,
        stream: TextStream | BeamStream,
        queue: asyncio.Queue[list[TextOutput] | BaseException | None],
    ) -> None:
        try:
            async for outputs in stream:
                for output in outputs:
                    output.choice += number * self._n
                await queue.put(outputs)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    def _account(self, output: TextOutput, now: float) -> None:
        metrics, choice = self._state.metrics, output.choice
        new = len(output.token_ids)
        if new:
            self._tokens[choice] = self._tokens.get(choice, 0) + new
            if self._first_token is None:
                self._first_token = now
                metrics.ttft.observe(now - self._arrival)
            before = self._last_output.get(choice, 0.0)
            if before:
                metrics.itl.observe(now - before)
            if choice in self._last_output:
                self._last_output[choice] = now
        prompt = choice // self._n
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.num_cached_tokens)
        scheduled, first_token = output.first_scheduled_time, output.first_token_time
        if scheduled is not None and first_token is not None and prompt not in self._timed:
            self._timed.add(prompt)
            metrics.queue_time.observe(scheduled - self._arrival)
            metrics.prefill_time.observe(first_token - scheduled)
        if output.finish_reason is None:
            return
        self._last_output.pop(choice, None)
        metrics.finished(output.finish_reason)
        raise_if_failed(output)

    def settle(self) -> Usage:
        """The usage so far; final once iteration has ended."""
        usage = self.usage
        usage.completion_tokens = sum(self._tokens.values())
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        usage.prompt_tokens_details = PromptTokensDetails(sum(self._cached.values()))
        return usage

    def collected(self) -> None:
        """The client has all of it: no journal need keep it."""
        if (journal := self._frontend.journal) is not None:
            for stream in self._streams:
                journal.drop(stream.request_id)

    async def aclose(self) -> None:
        """End what still runs and record the request. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for stream in self._streams:
                await stream.aclose()
        finally:
            self._record()
            self._state.leave()

    def _record(self) -> None:
        metrics, now = self._state.metrics, time.monotonic()
        for _ in self._last_output:
            metrics.finished("abort")
        usage = self.settle()
        if self._streams:
            metrics.e2e.observe(now - self._arrival)
            metrics.prompt_tokens.observe(usage.prompt_tokens)
            metrics.generation_tokens.observe(usage.completion_tokens)
        if self._first_token is not None:
            metrics.decode_time.observe(now - self._first_token)
            self._line["ttft_ms"] = round((self._first_token - self._arrival) * 1000, 1)
        self._line.update(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )


def raise_if_failed(output: TextOutput) -> None:
    """Raise what an end stands for that is no answer's."""
    if output.finish_reason == "error":
        raise error_of_kind(output.error_kind, output.error_message)
    if output.finish_reason == "abort":
        raise OverloadedError("the server is shutting down and ended this request")
