"""Answers that another process began: they go on here, and whoever asked for them comes back for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from operator import gt
from typing import TYPE_CHECKING

from headrace.engine.saved import SavedRequest
from headrace.errors import HeadraceError, NotResumableError, RequestNotFoundError
from headrace.frontend.outputs import TextOutput
from headrace.frontend.resume import resumed_stream
from headrace.server.generation import raise_if_failed
from headrace.server.positions import Positions
from headrace.server.responses import PromptTokensDetails, Usage
from headrace.server.saved_answer import Part, SavedAnswer, read_note

if TYPE_CHECKING:
    from headrace.frontend.frontend import Frontend
    from headrace.frontend.stream import TextStream
    from headrace.server.state import ServerState

_LOOK_EVERY_S = 1.0


class ResumedAnswer:
    """One answer: ``history`` is all that its choices have said, a token at a time.

    ``parts``: the engine's request of each prompt. ``exact``: it goes on with the very tokens with which it
    would have gone on. ``begun``: the position at which each choice began, which is not 0 if that was at
    yet another server. ``known``: the one that the process before is known to have reached.
    """

    def __init__(self, plan: SavedAnswer, parts: list[SavedRequest]) -> None:
        self.plan = plan
        self.parts = parts
        self.exact = all(part.exact for part in parts)
        self.ended = all(part.ended is not None for part in parts)
        said = [part.request.output_token_ids or [None] * plan.n for part in parts]
        self.begun = [len(ids or ()) for choices in said for ids in choices]
        self.known = self.begun.copy()
        for number, part in enumerate(parts):
            for choice, output in part.outputs.items():
                ended = output.finish_reason is not None
                self.known[number * plan.n + choice] += len(output.token_ids) + ended
        self.history: list[TextOutput] = []
        self.running = len(parts)
        self.readers = 0
        self.left_at = time.monotonic()  # when the last reader left
        self.changed = asyncio.Event()
        self.streams: list[TextStream] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def tenant(self) -> str:
        """On whose behalf it was asked for."""
        return self.parts[0].request.tenant

    def go_on(self, state: ServerState, frontend: Frontend) -> None:
        """Have the engine go on, once."""
        if self._tasks:
            return
        self._tasks = [
            asyncio.create_task(self._pump(number, part, state, frontend))
            for number, part in enumerate(self.parts)
        ]

    async def _pump(self, number: int, part: SavedRequest, state: ServerState, frontend: Frontend) -> None:
        first = number * self.plan.n
        try:
            stream = await resumed_stream(frontend, part)
            self.streams.append(stream)
            if (before := part.request.output_token_ids) and before[0]:
                self.history.append(TextOutput(first, text=stream.told, token_ids=before[0]))
            async for outputs in stream:
                for output in outputs:
                    output.choice += first
                    if output.finish_reason is not None:
                        state.metrics.finished(output.finish_reason)
                self.history += outputs
                self._tell()
        except Exception as error:  # whoever comes for it must learn of it
            if not isinstance(error, HeadraceError):
                state.log.error("unexpected error while resuming", answer=self.plan.id, exc_info=error)
                error = HeadraceError("something went wrong in the server; it is logged")
            end = partial(TextOutput, finish_reason="error", error_message=error.message)
            kind = type(error).__name__
            self.history += [end(first + choice, error_kind=kind) for choice in range(self.plan.n)]
        self.running -= 1
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def end(self) -> None:
        """Nobody wants it any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self.streams:
            await stream.aclose()


class Reading:
    """One client's way through an answer: iterate for what it has not seen; what it has goes to ``skip``."""

    def __init__(
        self,
        answer: ResumedAnswer,
        seen: Positions | None,
        skip: Callable[[TextOutput], None],
        state: ServerState,
    ) -> None:
        """``seen``: None = all of it. Raises NotResumableError for what may not come again as it was."""
        choices = len(answer.known)
        has = answer.known if seen is None else seen.counts
        if not answer.exact and any(map(gt, has, answer.known)):
            raise NotResumableError(
                "the server has changed (see system_fingerprint), and what it had told beyond its last "
                "checkpoint may not come again; ask anew"
            )
        self._answer = answer
        self._seen = None if seen is None else seen.counts
        self._skip = skip
        self._state = state
        self._next = 0
        self._at = Positions([0] * choices)
        self._tokens = 0
        self._cached = [0] * answer.plan.prompts
        self._closed = False
        answer.readers += 1
        state.enter()

    def __aiter__(self) -> AsyncIterator[list[TextOutput]]:
        return self

    async def __anext__(self) -> list[TextOutput]:
        answer = self._answer
        news: list[TextOutput] = []
        while True:
            while self._next < len(answer.history):
                output = answer.history[self._next]
                if news and output.finish_reason in ("error", "abort"):
                    return news  # what came before it is told first
                self._next += 1
                if (unseen := self._unseen(output)) is not None:
                    news.append(unseen)
            if news:
                return news
            if not answer.running:
                raise StopAsyncIteration
            await answer.changed.wait()

    def _unseen(self, output: TextOutput) -> TextOutput | None:
        """What of it is new to the client."""
        choice = output.choice
        before = self._at.counts[choice]
        after = self._at.advance(output)
        self._tokens += len(output.token_ids)
        prompt = choice // self._answer.plan.n
        self._cached[prompt] = max(self._cached[prompt], output.num_cached_tokens)
        raise_if_failed(output)
        seen = after if self._seen is None else self._seen[choice]
        if seen >= after:
            self._skip(output)
            if output.finish_reason is not None and seen > after:
                raise NotResumableError(
                    f"choice {choice} has ended at position {after}, but `Last-Event-ID` says {seen};"
                    "; ask anew"
                )
            return None
        if seen > before:  # its tokens, but not its end
            self._skip(replace(output, finish_reason=None))
            return replace(output, text="", token_ids=[], logprobs=None)
        return output

    def settle(self) -> Usage:
        """The usage so far."""
        prompt = sum(len(part.request.prompt_token_ids) for part in self._answer.parts)
        details = PromptTokensDetails(sum(self._cached))
        return Usage(prompt, self._tokens, prompt + self._tokens, details)

    def collected(self) -> None:
        """Nothing yet: should this client come again, it gets it again."""

    async def aclose(self) -> None:
        """Leave; the answer goes on. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._answer.readers -= 1
            self._answer.left_at = time.monotonic()
            self._state.leave()


class ResumedAnswers:
    """What the last process left. An answer that nobody comes for is ended after the grace time."""

    def __init__(self, state: ServerState, frontend: Frontend) -> None:
        self._state = state
        self._frontend = frontend
        self._answers: dict[str, ResumedAnswer] = {}
        self._task: asyncio.Task[None] | None = None
        assert frontend.journal is not None
        self._journal = frontend.journal

    def start(self) -> None:
        """Go on with what is unfinished, on the running event loop. Starting twice is fine."""
        if self._task is None:
            self._gather()
            self._task = asyncio.create_task(self._run())

    def find(self, name: str, tenant: str, *, by_request: bool) -> ResumedAnswer:
        """The answer of that id or, if ``by_request``, to the request of that name.

        Raises RequestNotFoundError for one that is not there, and in the same words for another tenant's.
        """
        found = self._answers.get(name)
        if found is None and by_request:
            same = (each for each in self._answers.values() if each.plan.request_name == name)
            found = next((each for each in same if each.tenant == tenant), None)
        if found is None or found.tenant != tenant:
            raise RequestNotFoundError(
                f"there is no answer {name[:100]!r} to be resumed: it was collected, it ended, or never "
                "saved" + ("" if by_request else "; without an API key only the answer's own id names it")
            )
        return found

    def open(self, answer: ResumedAnswer) -> None:
        """Have its history told: of one that was complete when the process began only if it is wanted."""
        answer.go_on(self._state, self._frontend)

    async def end(self, answer: ResumedAnswer) -> None:
        """Forget it."""
        self._answers.pop(answer.plan.id, None)
        await answer.end()
        for part in answer.parts:
            self._journal.drop(part.request.request_id)

    def _gather(self) -> None:
        plans: dict[str, SavedAnswer] = {}
        parts: dict[str, dict[int, SavedRequest]] = {}
        for saved in self._journal.saved:
            note = read_note(saved.request.note)
            if isinstance(note, SavedAnswer):
                plans[note.id] = note
                parts.setdefault(note.id, {})[0] = saved
            elif isinstance(note, Part):
                parts.setdefault(note.answer_id, {})[note.number] = saved
        for name, found in parts.items():
            plan = plans.get(name)
            if plan is not None and sorted(found) == list(range(plan.prompts)):
                self._answers[name] = ResumedAnswer(plan, [found[at] for at in range(plan.prompts)])
                continue
            for saved in found.values():  # some of its prompts had been dropped, or not been taken yet
                self._journal.drop(saved.request.request_id)
        self._journal.saved.clear()

    async def _run(self) -> None:
        unfinished = [answer for answer in self._answers.values() if not answer.ended]
        if self._answers:
            self._state.log.info(
                "resuming",
                unfinished=len(unfinished),
                complete=len(self._answers) - len(unfinished),
                exact=all(answer.exact for answer in self._answers.values()),
            )
        for answer in unfinished:
            self.open(answer)
        grace_s = self._journal.grace_s
        while self._answers:
            await asyncio.sleep(min(_LOOK_EVERY_S, grace_s / 4))
            latest = time.monotonic() - grace_s
            for answer in [*self._answers.values()]:
                if not answer.readers and answer.left_at < latest:
                    await self.end(answer)
