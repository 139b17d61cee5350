"""Grammars across the door: compiled by the caller or in the engine's process, never on the step's thread."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headrace.engine.client import EngineClient
from headrace.engine.engine import Engine
from headrace.engine.intake import Intake
from headrace.engine.loop import EngineLoop, News, Stop
from headrace.engine.process_client import ProcessClient
from headrace.engine.request import EngineRequest, StructuredOutputs
from headrace.engine.thread_client import ThreadClient
from headrace.errors import InvalidRequestError
from tests.engine.grammars import compiler, text_of, vocabulary
from tests.engine.small_engines import EOS, request, small_engine, tokens
from tests.engine.test_clients import Inbox, spec, until

KINDS: list[dict[str, Any]] = [
    {"regex": "[a-f]{4,9}x"},
    {"choice": ["the", "fox", "12345"]},
    {"json": {"type": "array", "items": {"enum": [1, 2, "a"]}, "minItems": 2, "maxItems": 4}},
    {"grammar": 'start: "the" (" " word)~2\nword: /[a-c]{2}/'},
]


def requests() -> list[EngineRequest]:
    return [
        request(
            f"r{i}",
            tokens(10 + i, i),
            n=2,
            max_tokens=60,
            structured_outputs=StructuredOutputs(**KINDS[i % 5]) if i % 5 < 4 else None,
        )
        for i in range(10)
    ]


def test_thread_and_process_give_the_same_answers() -> None:
    texts = []
    for client in (ThreadClient(spec().build()), ProcessClient(spec())):
        client.use_grammars(compiler())
        inbox = Inbox()
        for each in requests():
            client.submit(each, inbox.sink)
        answers = inbox.wait_ended(20)
        texts.append(answers.texts())
        client.close()
    assert texts[0] == texts[1]
    for i in (0, 5):
        ids = [token for token in texts[0][f"r{i}", 0][0] if token != EOS]
        assert re.fullmatch("[a-f]{4,9}x", text_of(ids))


@pytest.mark.parametrize("make", [lambda: ThreadClient(spec().build()), lambda: ProcessClient(spec())])
def test_an_abort_follows_its_request(make: Any) -> None:
    """A request that is still being compiled when its abort comes ran on for ever."""
    client: EngineClient = make()
    client.use_grammars(compiler())
    inbox = Inbox()
    for i in range(20):
        wanted = StructuredOutputs(regex=f"(a|b|{i})*")
        client.submit(
            request(f"r{i}", [1, 2], max_tokens=None, min_tokens=390, structured_outputs=wanted), inbox.sink
        )
        client.abort(f"r{i}")
    answers = inbox.wait_ended(20)
    assert {answer.finish_reason for answer in answers.values()} == {"abort"}
    until(lambda: client.stats().num_running_seqs == client.stats().num_waiting_seqs == 0)
    client.close()


def test_without_a_vocabulary_a_grammar_is_refused() -> None:
    client = ThreadClient(spec().build())
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        client.submit(
            request("r", [1], structured_outputs=StructuredOutputs(regex="a")), lambda outputs: None
        )
    inbox = Inbox()
    client.submit(request("r", [1], max_tokens=2), inbox.sink)  # the id is free again
    inbox.wait_ended(1)
    client.close()


def test_what_the_engines_process_cannot_compile_ends_with_an_error() -> None:
    """The process is told a request's end even if only it finds that the grammar is wrong."""
    client = ProcessClient(spec())
    client.use_grammars(compiler())
    inbox = Inbox()
    client.submit(request("bad", [1], n=2, structured_outputs=StructuredOutputs(regex="(")), inbox.sink)
    client.submit(request("good", [1], structured_outputs=StructuredOutputs(choice=["the"])), inbox.sink)
    answers = inbox.wait_ended(3)
    for choice in (0, 1):
        last = answers["bad", choice].last
        assert last is not None
        assert (last.finish_reason, last.error_kind) == ("error", "InvalidRequestError")
        assert "unclosed group" in (last.error_message or "")
    assert text_of([t for t in answers["good", 0].token_ids if t != EOS]) == "the"
    client.close()


def test_intake_lets_others_pass_while_it_compiles() -> None:
    """Requests without a grammar do not wait for the compiling of another's."""
    news: list[News] = []
    engine: Engine = small_engine()
    loop = EngineLoop(engine, news.append, lambda error: None)
    intake = Intake(loop)
    slow = StructuredOutputs(json={"enum": [f"value {i}" for i in range(8000)]})
    intake.take(vocabulary())
    intake.take(request("slow", [1], max_tokens=4, structured_outputs=slow))
    intake.take(request("fast", [1], max_tokens=4))
    loop.start()

    def order() -> list[str]:
        return [output.request_id for each in news for output in each.outputs if output.finish_reason]

    until(lambda: len(order()) == 2)
    assert order() == ["fast", "slow"]
    loop.post(Stop())
    assert loop.join(10)
