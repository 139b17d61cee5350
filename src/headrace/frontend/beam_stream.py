"""A beam search as a stream: one item, when it is over."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.engine.request import NOBODY, Sender
from headrace.frontend.beam_search import BeamSearch, BeamSearchParams, beam_text
from headrace.frontend.outputs import TextOutput

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend
    from headrace.frontend.stream import TextStream


class BeamStream:
    """Iterates once, over the ``n`` best answers, best first; or over their failure.

    Cancelling the wait or closing ends what runs.
    """

    def __init__(
        self,
        frontend: Frontend,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        *,
        n: int,
        request_id: str,
        sender: Sender = NOBODY,
        timeout_s: float | None = None,
    ) -> None:
        """``timeout_s``: from now to the end of the search, or it fails."""
        self._frontend = frontend
        self._prompt = prompt_token_ids
        self._n = n
        self.request_id = request_id
        self._sender = sender
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        room = frontend.max_model_len - len(prompt_token_ids)
        self._search = BeamSearch(params, frontend.eos_token_ids, room)
        self._streams: list[TextStream] = []
        self._num_cached_tokens = 0
        self._over = False

    def __aiter__(self) -> BeamStream:
        return self

    async def __anext__(self) -> list[TextOutput]:
        if self._over:
            raise StopAsyncIteration
        step = 0
        try:
            while not self._search.done and not self._over:
                if (failure := await self._step(step)) is not None:
                    self._over = True
                    return [failure]
                step += 1
        finally:
            await self.aclose()
        return [
            TextOutput(
                choice,
                text=beam_text(beam, self._frontend.tokenizer, self._prompt),
                token_ids=list(beam.token_ids),
                finish_reason="stop" if beam.stopped else "length",
                num_cached_tokens=self._num_cached_tokens,
            )
            for choice, beam in enumerate(self._search.ended[: self._n])
        ]

    async def aclose(self) -> None:
        """End what still runs. Closing twice is fine."""
        self._over = True
        for stream in self._streams:
            await stream.aclose()

    async def _step(self, step: int) -> TextOutput | None:
        """Go on by one token; the news of a beam that failed, if one did."""
        search, params = self._search, self._search.step_params
        if self._deadline is not None:  # one that has passed still needs a request that says so
            params.timeout_s = max(self._deadline - time.monotonic(), 1e-6)
        self._streams = []
        for number, beam in enumerate(search.running):
            stream = await self._frontend.start(
                [*self._prompt, *beam.token_ids],
                params,
                request_id=f"{self.request_id}-{step}-{number}",
                sender=self._sender,
            )
            self._streams.append(stream)
        ends = await asyncio.gather(*(_end(stream) for stream in self._streams))
        for end in ends:
            if end.finish_reason in ("error", "abort"):
                end.choice = 0
                return end
        if step == 0:
            self._num_cached_tokens = ends[0].num_cached_tokens
        likeliest = [end.logprobs[0] for end in ends if end.logprobs]
        search.advance([zip(top.top_ids, top.top_logprobs, strict=True) for top in likeliest])
        return None


async def _end(stream: TextStream) -> TextOutput:
    """The one item of a stream of one token."""
    last: TextOutput | None = None
    async for outputs in stream:
        [last] = outputs
    assert last is not None
    return last
