"""The door to the engine, in a thread and in a process: every sequence ends exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_engines import Answers, request, run, small_engine, tokens

from headrace.backend.batch import Batch, StepResult
from headrace.backend.simulated import SimulatedRunner
from headrace.engine.build import CheckpointSpec, SimulatedSpec
from headrace.engine.client import EngineClient
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.process_client import ProcessClient
from headrace.engine.request import EngineOutput, EngineRequest
from headrace.engine.thread_client import ThreadClient
from headrace.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    OverloadedError,
)

ENDLESS = {"ignore_eos": True, "max_tokens": None}


def spec(**scheduler: Any) -> SimulatedSpec:
    return SimulatedSpec(
        num_blocks=256, max_model_len=400, scheduler=SchedulerConfig(**scheduler), seed=0, step_s=0.001
    )


class Inbox:
    """Collects outputs of any number of requests; insists on one end for each sequence."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._changed = threading.Condition()

    def sink(self, outputs: list[EngineOutput]) -> None:
        with self._changed:
            self.answers.take(outputs)
            self._changed.notify_all()

    def wait(self, ready: Callable[[Answers], bool], timeout_s: float = 60.0) -> Answers:
        with self._changed:
            assert self._changed.wait_for(lambda: ready(self.answers), timeout_s), "the answer never came"
        return self.answers

    def wait_ended(self, count: int) -> Answers:
        return self.wait(lambda answers: sum(a.finish_reason is not None for a in answers.values()) == count)


@pytest.fixture(params=["thread", "process"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    made: EngineClient = ThreadClient(spec().build()) if request.param == "thread" else ProcessClient(spec())
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.002)


def test_answers_are_the_engines_own(client: EngineClient) -> None:
    """What crossed the process boundary came back without its logprobs, or twice."""
    requests = [request(f"r{i}", tokens(20 + i, i), n=2, max_tokens=20, logprobs=2) for i in range(8)]
    inbox = Inbox()
    for each in requests:
        client.submit(each, inbox.sink)
    answers = inbox.wait_ended(16)
    assert answers.texts() == run(small_engine(), requests).texts()
    assert (client.max_model_len, client.architecture.vocab_size) == (400, 64)
    assert client.capabilities.backend == "simulated"
    until(lambda: client.stats().num_running_seqs == 0)
    stats = client.stats()
    assert stats.num_free_blocks == stats.num_blocks == 256
    assert stats.generation_tokens == sum(len(answer.token_ids) for answer in answers.values())


def test_submitting_from_many_threads(client: EngineClient) -> None:
    """Requests submitted at the same moment were lost, or answered to each other."""
    inboxes = [Inbox() for _ in range(24)]
    threads = [
        threading.Thread(
            target=client.submit, args=(request(f"r{i}", tokens(10 + i, i), max_tokens=10), inboxes[i].sink)
        )
        for i in range(24)
    ]
    for thread in threads:
        thread.start()
    for i, inbox in enumerate(inboxes):
        assert inbox.wait_ended(1).keys() == {(f"r{i}", 0)}
    for thread in threads:
        thread.join()


def test_bad_requests_are_refused_at_submit(client: EngineClient) -> None:
    """An error that came by the sink was, for a stream, after the response had begun."""

    def sink(outputs: list[EngineOutput]) -> None:
        raise AssertionError("a refused request has no outputs")

    with pytest.raises(InvalidRequestError, match="temperature"):
        client.submit(request("r", [1], temperature=float("nan")), sink)
    with pytest.raises(ContextLengthError, match=r"400 tokens, but the prompt has 500"):
        client.submit(request("r", [1] * 500), sink)
    inbox = Inbox()
    client.submit(request("r", [1], **ENDLESS), inbox.sink)
    with pytest.raises(InvalidRequestError, match="under way"):
        client.submit(request("r", [1]), sink)
    client.abort("r")
    inbox.wait_ended(1)
    client.submit(request("r", [1], max_tokens=1), Inbox().sink)  # the id is free again


def test_abort_frees_and_ends(client: EngineClient) -> None:
    """An aborted request's client waited for an end that never came."""
    inbox = Inbox()
    client.submit(request("r", tokens(50, 1), n=2, **ENDLESS), inbox.sink)
    client.submit(request("other", tokens(50, 2), max_tokens=5, ignore_eos=True), inbox.sink)
    client.abort("r", 0)
    client.abort("r", 7)
    client.abort("unknown")
    answers = inbox.wait(lambda a: ("r", 0) in a and a["r", 0].finish_reason == "abort" and ("r", 1) in a)
    assert answers["r", 1].finish_reason is None
    client.abort("r")
    answers = inbox.wait_ended(3)
    assert answers["other", 0].finish_reason == "length"
    until(lambda: client.stats().num_free_blocks == 256)


def test_closing_ends_everything(client: EngineClient) -> None:
    """Closing the engine left its clients hanging."""
    inbox = Inbox()
    for i in range(40):  # more than run at once
        client.submit(request(f"r{i}", tokens(50, i), **ENDLESS), inbox.sink)
    client.close()
    assert {answer.finish_reason for answer in inbox.wait_ended(40).values()} == {"abort"}
    client.close()
    with pytest.raises(EngineDeadError):
        client.submit(request("late", [1]), inbox.sink)
    client.abort("r0")
    assert client.stats().num_running_seqs == 0


def test_a_broken_sink_harms_nobody_else(client: EngineClient, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in one client's callback ended the engine for all."""

    def broken(outputs: list[EngineOutput]) -> None:
        raise RuntimeError("the client's own mistake")

    inbox = Inbox()
    client.submit(request("broken", tokens(50, 1), **ENDLESS), broken)
    client.submit(request("good", tokens(50, 2), max_tokens=30, ignore_eos=True), inbox.sink)
    assert inbox.wait_ended(1)["good", 0].finish_reason == "length"
    until(lambda: client.stats().num_running_seqs == 0)
    assert "broken" in caplog.text


def test_a_full_queue_refuses_at_submit() -> None:
    """Only the engine's thread knew how long its queue was: a burst went past the limit."""
    client = ThreadClient(spec(max_num_seqs=1, max_waiting=4).build())
    inbox = Inbox()
    accepted = 0
    with pytest.raises(OverloadedError):
        for i in range(50):
            client.submit(request(f"r{i}", tokens(5, i), **ENDLESS), inbox.sink)
            accepted += 1
    assert 4 <= accepted <= 6
    client.close()
    inbox.wait_ended(accepted)


def test_an_idle_engine_sleeps() -> None:
    """The engine's thread spun while nobody asked, and a quiet server drew full power."""
    client = ThreadClient(spec().build())
    inbox = Inbox()
    client.submit(request("r", [1], max_tokens=1), inbox.sink)
    inbox.wait_ended(1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    client.close()


class Mortal(SimulatedRunner):
    """Fails in its third step, as a lost device would."""

    steps = 0

    def run(self, batch: Batch) -> StepResult:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("device lost")
        return super().run(batch)


def test_a_dying_engine_ends_everything_with_an_error() -> None:
    """The engine's thread ended with a traceback; every client waited for ever."""
    client = ThreadClient(small_engine(runner=Mortal))
    inbox = Inbox()
    client.submit(request("r", tokens(5, 1), n=3, **ENDLESS), inbox.sink)
    answers = inbox.wait_ended(3)
    for answer in answers.values():
        assert answer.finish_reason == "error"
        assert answer.last is not None
        assert answer.last.error_kind == "EngineDeadError"
        assert "device lost" in (answer.last.error_message or "")
    with pytest.raises(EngineDeadError, match="device lost"):
        client.submit(request("late", [1]), inbox.sink)
    client.close()


# Processes


def test_killing_the_process_ends_everything_with_an_error() -> None:
    """The kernel killed the engine's process for its memory, and the server answered nobody any more."""
    client = ProcessClient(spec())
    inbox = Inbox()
    for i in range(40):
        client.submit(request(f"r{i}", tokens(50, i), n=1 + i % 2, **ENDLESS), inbox.sink)
    inbox.wait(lambda answers: len(answers) > 3)
    os.kill(client.pid, signal.SIGKILL)
    answers = inbox.wait_ended(60)
    assert {answer.last.error_kind for answer in answers.values() if answer.last} == {"EngineDeadError"}
    with pytest.raises(EngineDeadError, match="signal 9"):
        client.submit(request("late", [1]), inbox.sink)
    assert client.stats().num_running_seqs == 0
    client.close()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (
            SimulatedSpec(num_blocks=4, max_model_len=64, scheduler=SchedulerConfig(max_num_seqs=0)),
            ConfigError,
        ),
        (
            CheckpointSpec(
                path="/nowhere/model.gguf",
                model=ModelConfig(),
                cache=CacheConfig(block_size=32),
                scheduler=SchedulerConfig(),
            ),
            ConfigError,
        ),
    ],
)
def test_errors_of_loading_come_back_as_they_were(
    broken: SimulatedSpec | CheckpointSpec, error: type[HeadraceError]
) -> None:
    """Every failure to load was "the engine's process ended"."""
    with pytest.raises(error) as caught:
        ProcessClient(broken)
    assert type(caught.value) is error
    assert caught.value.param


def test_a_request_that_cannot_be_sent_is_refused() -> None:
    """A value that msgpack does not know raised in the middle of a message."""
    client = ProcessClient(spec())
    huge = EngineRequest(**{**_fields(request("r", [1])), "priority": 0, "cache_salt": "x" * (65 * 2**20)})
    with pytest.raises(InvalidRequestError, match="limit"):
        client.submit(huge, Inbox().sink)
    inbox = Inbox()
    client.submit(request("r", [1], max_tokens=1), inbox.sink)
    inbox.wait_ended(1)
    client.close()


def _fields(each: EngineRequest) -> dict[str, Any]:
    return {name: getattr(each, name) for name in each.__struct_fields__}


def test_the_process_ignores_signals_meant_for_its_parent() -> None:
    """Control-C in the terminal killed the engine before the server had drained."""
    client = ProcessClient(spec())
    inbox = Inbox()
    client.submit(request("r", tokens(5, 1), max_tokens=100, ignore_eos=True), inbox.sink)
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    assert inbox.wait_ended(1)["r", 0].finish_reason == "length"
    client.close()


def test_the_process_dies_with_its_parent() -> None:
    """A killed server left its engine behind, holding memory and cores."""
    program = """
        from headrace.engine.build import SimulatedSpec
        from headrace.engine.config import SchedulerConfig
        from headrace.engine.process_client import ProcessClient
        import time
        client = ProcessClient(SimulatedSpec(num_blocks=4, max_model_len=64, scheduler=SchedulerConfig()))
        print(client.pid, flush=True)
        time.sleep(60)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _alive(child)
        parent.kill()
    until(lambda: not _alive(child))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
