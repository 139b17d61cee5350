"""Whole answers or embeddings for many prompts at once: the blocking side of the frontend."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from headrace import errors
from headrace.engine.request import SamplingParams, Sender, TokenLogprobs
from headrace.errors import DeadlineExceededError, GenerationError, HeadraceError, OverloadedError
from headrace.frontend.embedding import vector_of
from headrace.frontend.frontend import Frontend
from headrace.frontend.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    TextOutput,
)
from headrace.frontend.text_request import TextRequest
from headrace.frontend.tokenizer import Tokenizer

_GATHER = 16  # tokens of a sequence that are told together: the engine needs the cores meanwhile


class BatchError(GenerationError):
    """Some sequences of a batch failed. ``outputs`` hold all answers; failed ones end with ``error``."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One prompt, checked. ``text`` is None if it was given as token ids. ``note``: see Frontend.submit."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    note: bytes = b""


def generate_batch(
    frontend: Frontend, requests: Sequence[BatchRequest], *, max_sequences: int, show_progress: bool
) -> list[RequestOutput]:
    """Run all requests, at most ``max_sequences`` sequences at a time, and return answers in their order.

    The most urgent are submitted first. An exception, KeyboardInterrupt included, ends what runs, though what
    a journal keeps goes on in the next process. Raises BatchError after the others have finished if a
    sequence failed, or at once what submitting raises.
    """
    news: SimpleQueue[TextRequest] = SimpleQueue()
    running: dict[str, tuple[int, TextRequest]] = {}
    outputs: list[RequestOutput | None] = [None] * len(requests)
    failures: list[tuple[int, TextOutput]] = []
    order = sorted(range(len(requests)), key=lambda index: requests[index].priority)
    waiting = 0  # the place in that order of the next request to submit
    sequences = 0  # that run
    with progress_bar(len(requests), show_progress) as advance:
        try:
            while waiting < len(requests) or running:
                while waiting < len(requests):
                    index = order[waiting]
                    request = requests[index]
                    if running and sequences + request.params.n > max_sequences:
                        break
                    try:
                        submitted = frontend.submit(
                            request.token_ids,
                            request.params,
                            news.put,
                            sender=Sender(priority=request.priority),
                            note=request.note,
                            gather=_GATHER,
                        )
                    except OverloadedError:
                        if not running:
                            raise
                        break
                    outputs[index] = empty_output(submitted, request.text, request.params)
                    running[submitted.request_id] = (index, submitted)
                    sequences += request.params.n
                    waiting += 1
                woken = news.get()
                if woken.request_id not in running:
                    continue  # its end came together with earlier news
                index, _ = running[woken.request_id]
                woken.process()
                tokens = 0
                for output in woken.take():
                    answer = outputs[index]
                    assert answer is not None
                    append(answer, output, frontend.tokenizer)
                    tokens += len(output.token_ids)
                    if output.finish_reason == "error":
                        failures.append((index, output))
                if woken.finished:
                    del running[woken.request_id]
                    sequences -= requests[index].params.n
                advance(tokens, woken.finished)
        except BaseException:
            for _, request_under_way in running.values():
                suspend(frontend, request_under_way)
            raise
    answers = [output for output in outputs if output is not None]
    if frontend.journal is not None:
        for answer in answers:
            frontend.journal.drop(answer.request_id)
    if failures:
        raise failure(failures, answers)
    return answers


def embed_batch(
    frontend: Frontend,
    texts: Sequence[tuple[str | None, list[int]]],
    *,
    dimensions: int | None,
    show_progress: bool,
) -> list[EmbeddingRequestOutput]:
    """Embed all ``texts`` (with their token ids) and return vectors in their order.

    An exception, KeyboardInterrupt included, aborts what runs. Raises what the first failure was.
    """
    encoder = frontend.client.architecture.encoder
    assert encoder is not None
    if not texts:
        return []
    news: SimpleQueue[int | None] = SimpleQueue()  # indices of texts that are embedded; None at the end
    job = frontend.embedding_job([ids for _, ids in texts], lambda: news.put(None), embedded=news.put)
    with progress_bar(len(texts), show_progress) as advance:
        try:
            job.start()
            while (index := news.get()) is not None:
                advance(len(texts[index][1]), True)
        except BaseException:
            job.abort()
            raise
    if job.error is not None:
        raise job.error
    return [
        EmbeddingRequestOutput(
            request_id=output.request_id,
            outputs=EmbeddingOutput(vector_of(output, dimensions, normalize=encoder.normalize).tolist()),
            prompt=text,
            prompt_token_ids=ids,
        )
        for (text, ids), output in zip(texts, job.outputs, strict=True)
    ]


def suspend(frontend: Frontend, request: TextRequest) -> None:
    """End a request in this process; if a journal keeps it, the next one goes on with it."""
    if frontend.journal is None:
        request.abort()
        return
    from headrace.engine.journaled_client import JournaledClient

    assert isinstance(frontend.client, JournaledClient)
    frontend.client.suspend(request.request_id)


def failure(failures: list[tuple[int, TextOutput]], answers: list[RequestOutput]) -> HeadraceError:
    """What to raise when sequences have failed. ``failures``: each one's prompt by its place, and its end."""
    index, first = failures[0]
    message = first.error_message or "generation failed"
    kind = getattr(errors, first.error_kind or "", None)
    of_one = (GenerationError, DeadlineExceededError)
    if isinstance(kind, type) and issubclass(kind, HeadraceError) and not issubclass(kind, of_one):
        return kind(message)  # the engine's, and so everybody's
    return BatchError(
        f"{len(failures)} of the sequences failed, first one of prompt {index}: {message}", answers
    )


def empty_output(request: TextRequest, text: str | None, params: SamplingParams) -> RequestOutput:
    """The answers of a request that has had none."""
    wants_logprobs = params.logprobs is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[
            CompletionOutput(
                index=choice,
                logprobs=[] if wants_logprobs else None,
                cumulative_logprob=0.0 if wants_logprobs else None,
            )
            for choice in range(params.n)
        ],
    )


def append(answer: RequestOutput, news: TextOutput, tokenizer: Tokenizer) -> None:
    """Add news of one choice."""
    completion = answer.outputs[news.choice]
    completion.text += news.text
    completion.token_ids += news.token_ids
    completion.finish_reason, completion.stop_reason = news.finish_reason, news.stop_reason
    if news.prompt_logprobs is not None:
        answer.prompt_logprobs = [None, *(candidates(entry, tokenizer) for entry in news.prompt_logprobs)]
    answer.num_cached_tokens = max(answer.num_cached_tokens, news.num_cached_tokens)
    if completion.logprobs is not None and news.logprobs is not None:
        completion.logprobs += [candidates(entry, tokenizer) for entry in news.logprobs]
        total = completion.cumulative_logprob or 0.0
        completion.cumulative_logprob = total + sum(entry.logprob for entry in news.logprobs)


def candidates(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The likeliest tokens at one position, and the one that is there, by id."""

    def text(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    found = {
        token: Logprob(logprob, rank, text(token))
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    }
    if entry.token_id not in found:
        found[entry.token_id] = Logprob(entry.logprob, None, text(entry.token_id))
    return found


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Callable[[int, bool], None]]:
    """A bar of finished prompts and tokens per second on stderr, if that is a terminal.

    Yields a function of new tokens and of whether a prompt has finished.
    """
    if not (show and sys.stderr.isatty()):
        yield lambda tokens, finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("Processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]:.1f} tokens/s"),
    )
    began, produced = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=total, speed=0.0)

        def advance(tokens: int, finished: bool) -> None:
            nonlocal produced
            produced += tokens
            speed = produced / max(time.monotonic() - began, 1e-9)
            bar.update(task, advance=1 if finished else 0, speed=speed)

        yield advance
