"""Going on with what another process was asked: text is made again of the tokens that a journal has."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from headrace.engine.journaled_client import JournaledClient
from headrace.engine.saved import SavedRequest
from headrace.frontend.batch import append, empty_output, failure, progress_bar, suspend
from headrace.frontend.frontend import Frontend
from headrace.frontend.outputs import RequestOutput, TextOutput
from headrace.frontend.text_request import TextRequest

if TYPE_CHECKING:
    from headrace.frontend.stream import TextStream


class PromptNote(msgspec.Struct, tag="prompt", omit_defaults=True):
    """What :class:`LLM` has a journal keep of a prompt: its text, None if it was given as token ids."""

    text: str | None = None


def resume(
    frontend: Frontend,
    saved: SavedRequest,
    wake: Callable[[TextRequest], None],
    *,
    one_by_one: bool = False,
) -> TextRequest:
    """Go on with a request out of ``journal.saved``: what Frontend.submit returned in another process.

    It gives everything again from the first token on; what that process had is there at once, without a
    ``wake``. ``one_by_one``: an output for each token. Compiles its grammar, if it has one. If the engine
    refuses, its choices end with the error.
    """
    client = frontend.client
    assert isinstance(client, JournaledClient)
    if saved.request.params.structured_outputs is not None:
        frontend.compile(saved.request.params.structured_outputs)
    request = TextRequest(client, saved.request, frontend.tokenizer, wake, one_by_one=one_by_one)
    request.replay(saved.outputs.values())
    if choices := [choice for choice in request.open_choices if choice in saved.request.open_choices]:
        client.resume(saved, request.receive, choices)
    return request


async def resumed_stream(frontend: Frontend, saved: SavedRequest) -> TextStream:
    """:func:`resume` as a stream whose items have one output for each token."""
    import asyncio

    from headrace.frontend.stream import TextStream

    if saved.request.params.structured_outputs is not None:
        await asyncio.to_thread(frontend.compile, saved.request.params.structured_outputs)
    return TextStream(lambda wake: resume(frontend, saved, wake, one_by_one=True), frontend.waker())


def prompt_note(text: str | None) -> bytes:
    """The note of a request of :meth:`LLM.generate`."""
    return msgspec.msgpack.encode(PromptNote(text))


def resume_batch(frontend: Frontend, *, show_progress: bool) -> list[RequestOutput]:
    """Answers to all prompts that other processes left in the journal, in their order of arrival.

    An exception, KeyboardInterrupt included, ends what runs, which then goes on in the next process. Raises
    as generate_batch does.
    """
    assert frontend.journal is not None
    saved = _taken(frontend.journal.saved)
    news: SimpleQueue[TextRequest] = SimpleQueue()
    answers: list[RequestOutput] = []
    failures: list[tuple[int, TextOutput]] = []
    requests: dict[str, tuple[int, TextRequest]] = {}
    with progress_bar(len(saved), show_progress) as advance:
        try:
            for index, (each, note) in enumerate(saved):
                request = resume(frontend, each, news.put)
                requests[request.request_id] = index, request
                answers.append(empty_output(request, note.text, each.request.params))
                news.put(request)  # what it has had is there without a wake
            running = set(requests)
            while running:
                woken = news.get()
                index, _ = requests[woken.request_id]
                woken.process()
                tokens = 0
                for output in woken.take():
                    append(answers[index], output, frontend.tokenizer)
                    tokens += len(output.token_ids)
                    if output.finish_reason == "error":
                        failures.append((index, output))
                ended = woken.finished and woken.request_id in running
                running -= {woken.request_id} if ended else set()
                advance(tokens, ended)
        except BaseException:
            for _, request in requests.values():
                suspend(frontend, request)
            raise
    for answer in answers:
        frontend.journal.drop(answer.request_id)
    if failures:
        raise failure(failures, answers)
    return answers


def _taken(saved: list[SavedRequest]) -> list[tuple[SavedRequest, PromptNote]]:
    """Those that an LLM left; they are taken out of the list, a server's stay there."""
    found, others = [], []
    for each in saved:
        try:
            found.append((each, msgspec.msgpack.decode(each.request.note, type=PromptNote)))
        except msgspec.DecodeError:
            others.append(each)
    saved[:] = others
    return found
