"""An engine's process is killed, again and again, and whoever waits gets the same tokens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from small_engines import VOCAB, Answers, request, run, small_engine, tokens

from headrace.engine.build import SimulatedSpec
from headrace.engine.config import SchedulerConfig
from headrace.engine.process_client import ProcessClient
from headrace.engine.request import EngineOutput
from headrace.engine.reviving_client import RevivingClient
from headrace.engine.saved import MAX_DEATHS
from headrace.errors import ConfigError, EngineDeadError, InvalidRequestError, OverloadedError

SPEC = SimulatedSpec(
    num_blocks=256, max_model_len=400, scheduler=SchedulerConfig(), vocab_size=VOCAB, seed=0, step_s=0.002
)


class Lives:
    """Makes engines' processes and kills them."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.all: list[ProcessClient] = []
        self.fails = False
        self.pause = threading.Event()
        self.pause.set()

    def open(self) -> ProcessClient:
        assert self.pause.wait(30)
        if self.fails:
            raise ConfigError("no more of it")
        self.all.append(ProcessClient(self.spec))
        return self.all[-1]

    def kill(self) -> None:
        os.kill(self.all[-1].pid, signal.SIGKILL)


class Sink:
    def __init__(self) -> None:
        self.answers = Answers()

    def take(self, outputs: list[EngineOutput]) -> None:
        self.answers.take(outputs)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def wait(self, count: int) -> None:
        """Until so many choices have ended."""
        until(lambda: sum(each.finish_reason is not None for each in list(self.answers.values())) == count)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def lives() -> Lives:
    return Lives()


@pytest.fixture
def client(lives: Lives) -> Iterator[RevivingClient]:
    made = RevivingClient(lives.open)
    yield made
    made.close()


def test_killed_twice_the_tokens_are_the_same(client: RevivingClient, lives: Lives) -> None:
    """All requests ended with an error because one process had died."""
    asked = [
        request("two", tokens(20, 1), max_tokens=120, ignore_eos=True, n=2, logprobs=1),
        request("penalty", tokens(30, 2), max_tokens=150, ignore_eos=True, repetition_penalty=1.3),
        request("short", tokens(5, 3), max_tokens=2),
        request("scored", tokens(40, 4), max_tokens=100, prompt_logprobs=1),
    ]
    sink = Sink()
    for each in asked:
        client.submit(each, sink.take)
    for enough in (40, 200):
        until(lambda enough=enough: sink.tokens > enough)
        lives.kill()
    sink.wait(5)
    assert sink.answers.texts() == run(small_engine(), asked).texts()
    assert len(lives.all) == 3


def test_while_there_is_no_engine(client: RevivingClient, lives: Lives) -> None:
    """A request that was aborted while the engine was being started ran without an owner."""
    left, stays = Sink(), Sink()
    client.submit(request("left", tokens(9, 1), max_tokens=300, ignore_eos=True, n=2), left.take)
    client.submit(request("stays", tokens(9, 2), max_tokens=60, ignore_eos=True, n=2), stays.take)
    until(lambda: left.tokens > 4 and stays.tokens > 4)
    lives.pause.clear()
    lives.kill()
    until(lambda: client._reviving)
    with pytest.raises(OverloadedError, match="started again"):
        client.submit(request("new", tokens(9, 3)), Sink().take)
    client.abort("left")
    client.abort("stays", 1)
    client.abort("unknown")
    left.wait(2)
    lives.pause.set()
    stays.wait(2)
    assert {answer.finish_reason for answer in left.answers.values()} == {"abort"}
    whole = run(small_engine(), [request("stays", tokens(9, 2), max_tokens=60, ignore_eos=True, n=2)])
    assert stays.answers["stays", 0].text() == whole["stays", 0].text()
    assert stays.answers["stays", 1].finish_reason == "abort"
    until(lambda: client.stats().num_running_seqs == 0)
    with pytest.raises(InvalidRequestError, match="under way"):
        again = request("twice", tokens(9, 1), max_tokens=300, ignore_eos=True)
        for _ in range(2):
            client.submit(again, Sink().take)
    client.abort("twice")


def test_dead_while_nobody_waits(client: RevivingClient, lives: Lives) -> None:
    """The first request after a death had an error, and nothing was started."""
    lives.kill()
    sink = Sink()
    asked = request("r", tokens(9, 1), max_tokens=5)

    def submitted() -> bool:
        try:
            client.submit(asked, sink.take)
        except OverloadedError:
            return False
        return True

    until(submitted)
    sink.wait(1)
    assert sink.answers["r", 0].finish_reason in ("stop", "length")


def test_an_engine_that_cannot_be_started_again(client: RevivingClient, lives: Lives) -> None:
    """Requests waited for ever for an engine that would never come."""
    sink = Sink()
    client.submit(request("r", tokens(9, 1), max_tokens=300, ignore_eos=True, n=2), sink.take)
    lives.fails = True
    lives.kill()
    sink.wait(2)
    last = sink.answers["r", 1].last
    assert last is not None and last.error_kind == "EngineDeadError"
    with pytest.raises(EngineDeadError):
        client.submit(request("new", tokens(9, 1)), sink.take)


def test_a_request_that_kills_every_engine(lives: Lives) -> None:
    """One request took engine after engine along."""
    lives.spec = msgspec.structs.replace(SPEC, step_s=60.0)  # none of them gets as far as a token
    client, sink = RevivingClient(lives.open), Sink()
    client.submit(request("deadly", tokens(9, 1)), sink.take)
    for number in range(1, MAX_DEATHS + 1):
        lives.kill()
        until(lambda number=number: len(lives.all) > number)
    sink.wait(1)
    client.close(0.1)
    last = sink.answers["deadly", 0].last
    assert last is not None and last.error_kind == "GenerationError"
    assert "not tried again" in str(last.error_message)
