"""The journal and the engine: wherever a process dies, another one goes on with the same tokens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import SPECULATION, random_shape
from small_engines import VOCAB, Answers, assert_idle, request, run, small_engine, tokens

from headrace.engine.build import SimulatedSpec
from headrace.engine.config import CheckpointConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.journal import Journal
from headrace.engine.journal_file import MAGIC, read_records
from headrace.engine.journaled_client import JournaledClient
from headrace.engine.process_client import ProcessClient
from headrace.engine.request import EngineOutput, EngineRequest
from headrace.engine.saved import MAX_DEATHS, Identity, SavedRequest
from headrace.engine.thread_client import ThreadClient
from headrace.errors import CheckpointError, ConfigError, ContextLengthError, InvalidRequestError

IDENTITY = Identity("finger", "small", VOCAB, exact=True)
JOURNAL = "requests.journal"


class Sinks:
    """Collects the outputs of requests; ``wait`` until each of their choices has ended."""

    def __init__(self) -> None:
        self.answers = Answers()
        self._changed = threading.Condition()

    def take(self, outputs: list[EngineOutput]) -> None:
        with self._changed:
            self.answers.take(outputs)
            self._changed.notify_all()

    def wait(self, keys: list[tuple[str, int]]) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(key in self.answers and self.answers[key].finish_reason for key in keys), 30
            )


@pytest.fixture
def open_client(tmp_path: Path) -> Iterator[Callable[..., JournaledClient]]:
    """Clients over engines of ``small_engine``; all are closed in the end."""
    opened: list[JournaledClient] = []

    def make(
        folder: Path = tmp_path, identity: Identity = IDENTITY, config: Any = None, **engine: Any
    ) -> JournaledClient:
        inner = ThreadClient(small_engine(**engine))
        settings = CheckpointConfig(str(folder), **{"interval_s": 0.0, **(config or {})})
        opened.append(JournaledClient(inner, Journal(settings, identity), seed=0))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


def noted(asked: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(asked, note=b"kept")


def keys_of(asked: list[EngineRequest]) -> list[tuple[str, int]]:
    return [(each.request_id, choice) for each in asked for choice in range(each.params.n)]


def killed(folder: Path, to: Path) -> Path:
    """What a process that dies now leaves: a copy of its folder."""
    shutil.copytree(folder, to)
    return to


def go_on(client: JournaledClient) -> Answers:
    """Everything that the journal has, to its end: what it had been told, and what follows."""
    sinks = Sinks()
    waited: list[tuple[str, int]] = []
    for saved in client.journal.saved:
        sinks.take([output.__copy__() for output in saved.copy().outputs.values()])
        waited += keys_of([saved.request])
        if saved.open_choices:
            client.resume(saved, sinks.take, saved.open_choices)
    sinks.wait(waited)
    return sinks.answers


def saved_tokens(client: JournaledClient) -> int:
    return sum(saved.num_tokens for saved in list(client.journal._requests.values()))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def some_requests(seed: int, count: int) -> list[EngineRequest]:
    """Of every kind: choices, penalties, log-probabilities, stops, priorities, tenants."""
    prefixes = [tokens(80, 1), tokens(80, 2)]
    made = []
    for number in range(count):
        shape = random_shape(1000 * seed + number, prefixes, VOCAB, [5, 20, 40])
        made.append(
            noted(
                shape.request(
                    f"r{number}", priority=number % 3, tenant="ab"[number % 2], salt="ab"[number % 2]
                )
            )
        )
    return made


@pytest.mark.parametrize("seed", range(3))
def test_cut_anywhere_the_answers_are_the_same(
    seed: int, open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """A process that died between two records, or in one, lost or repeated what it had said last."""
    asked = some_requests(seed, 9)
    whole = run(small_engine(max_num_batched_tokens=4096), asked).texts()
    first = open_client(tmp_path / "first", max_num_batched_tokens=40, speculative=SPECULATION[seed])
    sinks = Sinks()
    for each in asked:
        first.submit(each, sinks.take)
    sinks.wait(keys_of(asked))
    first.journal.sync()
    assert sinks.answers.texts() == whole
    data = (tmp_path / "first" / JOURNAL).read_bytes()

    ends = [len(MAGIC)]
    for record in read_records(tmp_path / "first"):
        ends.append(ends[-1] + 8 + len(record))
    assert ends[-1] == len(data) and len(ends) > 30
    step = len(ends) // 7
    cuts = [end + torn for end in ends[::step] for torn in (0, 5, 11)] + [0, 3, len(data)]
    seen = set()
    for number, cut in enumerate(sorted({min(cut, len(data)) for cut in cuts})):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        (folder / JOURNAL).write_bytes(data[:cut])
        client = open_client(
            folder,
            num_blocks=[256, 31][number % 2],
            max_num_batched_tokens=[7, 64][number % 2],
            speculative=SPECULATION[number % len(SPECULATION)],
            max_waiting=1,
        )
        assert all(saved.exact for saved in client.journal.saved)
        names = [saved.request.request_id for saved in client.journal.saved]
        seen.add(len(names))
        texts = go_on(client).texts()
        assert texts == {key: text for key, text in whole.items() if key[0] in names}
        client.close()
    assert {0, len(asked)} <= seen, "no cut was before the first request, or none behind the last"


def test_one_that_is_killed_again_and_again(
    open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """What a second process had added was lost to the third: it went on from the first one's file."""
    asked = [noted(request("long", tokens(20, 1), n=2, max_tokens=200, ignore_eos=True, logprobs=1))]
    whole = run(small_engine(), asked).texts()
    folder, sinks, known = tmp_path / "0", Sinks(), 0
    client = open_client(folder, max_num_batched_tokens=8)

    def slowly(outputs: list[EngineOutput]) -> None:
        """So that the answer does not end before the last of the deaths."""
        time.sleep(0.004)
        sinks.take(outputs)

    client.submit(asked[0], slowly)
    for number in range(1, 5):
        until(lambda: saved_tokens(client) >= known + 30)  # noqa: B023
        client.journal.sync()
        folder = killed(folder, tmp_path / str(number))
        client.close()
        client = open_client(folder, max_num_batched_tokens=8)
        [saved] = client.journal.saved
        assert saved.num_tokens >= known + 30
        known = saved.num_tokens
        if number < 4:
            sinks = Sinks()
            client.resume(saved, slowly, [0, 1])
    assert go_on(client).texts() == whole


def test_what_a_request_is_made_of_survives(
    open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """An unseeded request drew another seed in the second process, and its answer changed half way."""
    client = open_client(tmp_path / "a", seed=None)
    sinks = Sinks()
    asked = noted(request("r", tokens(9, 3), priority=2, tenant="t", salt="s", seed=None, max_tokens=9))
    client.submit(asked, sinks.take)
    sinks.wait([("r", 0)])
    client.journal.sync()
    [saved] = open_client(killed(tmp_path / "a", tmp_path / "b")).journal.saved
    assert saved.request.params.seed is not None
    assert saved.outputs[0].token_ids == sinks.answers["r", 0].token_ids
    saved.request.params.seed = None
    assert saved.request == asked


def test_seeds_are_those_of_an_engine_without_a_journal(
    open_client: Callable[..., JournaledClient],
) -> None:
    """--seed gave other answers as soon as requests were kept."""
    client, sinks = open_client(), Sinks()
    asked = [request(f"r{i}", tokens(9, 3), seed=None, max_tokens=9) for i in range(4)]
    for number, each in enumerate(asked):
        client.submit(noted(each) if number % 2 else each, sinks.take)
    sinks.wait(keys_of(asked))
    assert sinks.answers.texts() == run(small_engine(), asked).texts()


def test_the_time_of_a_request_runs_on(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """A restart gave every request its whole timeout_s again."""
    client = open_client(tmp_path / "a")
    client.submit(
        noted(request("r", tokens(9, 3), max_tokens=300, ignore_eos=True, timeout_s=50.0)), Sinks().take
    )
    client.journal.sync()
    folder = killed(tmp_path / "a", tmp_path / "b")
    client = open_client(folder)
    [saved] = client.journal.saved
    assert abs(saved.admitted - time.time()) < 30
    saved.admitted -= 60.0  # as if the server had been away for a minute
    sinks = Sinks()
    client.resume(saved, sinks.take, [0])
    sinks.wait([("r", 0)])
    last = sinks.answers["r", 0].last
    assert last is not None and last.error_kind == "DeadlineExceededError"


def test_what_is_aborted_or_collected_does_not_come_back(
    open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """Requests whose clients had left were computed again after every restart."""
    client, sinks = open_client(tmp_path / "a"), Sinks()
    for name in ("left", "has it", "unnamed", "stays"):
        asked = request(name, tokens(9, 3), max_tokens=390, ignore_eos=True)
        client.submit(asked if name == "unnamed" else noted(asked), sinks.take)
    client.abort("left")
    sinks.wait([("has it", 0)])
    client.journal.drop("has it")
    client.journal.drop("nobody's")
    client.journal.sync()
    [saved] = open_client(killed(tmp_path / "a", tmp_path / "b")).journal.saved
    assert saved.request.request_id == "stays"


def test_closing_ends_nothing(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """A server that was told to stop aborted its requests, and the next one knew nothing of them."""
    client, sinks = open_client(tmp_path / "a"), Sinks()
    asked = [noted(request(f"r{i}", tokens(9, i), max_tokens=390, ignore_eos=True)) for i in range(40)]
    for each in asked:
        client.submit(each, sinks.take)
    client.close()
    client.abort("r3")  # its owner tidies up
    sinks.wait(keys_of(asked))
    with pytest.raises(CheckpointError):
        client.journal.sync()
    client = open_client(tmp_path / "a", max_waiting=2, max_num_seqs=4, max_queue_time_s=0.0)
    assert [saved.request.request_id for saved in client.journal.saved] == [f"r{i}" for i in range(40)]
    assert go_on(client).texts() == run(small_engine(), asked).texts()


def test_a_request_that_kills_is_given_up(
    open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """One request that crashed the engine crashed every process after it, for ever."""
    client = open_client(tmp_path / "0", num_blocks=2)
    client.submit(noted(request("victim", tokens(20, 1), max_tokens=5)), Sinks().take)
    client.submit(noted(request("deadly", tokens(20, 1), max_tokens=5, n=2)), Sinks().take)
    client.journal.sync()
    for number in range(1, MAX_DEATHS + 1):
        folder = killed(tmp_path / str(number - 1), tmp_path / str(number))
        client.close()
        if number == 1:  # of the first process: nothing yet that the next one would know
            data = (folder / JOURNAL).read_bytes()
            records = [msgspec.msgpack.decode(record) for record in read_records(folder)]
            assert [record["type"] for record in records[:3]] == ["identity", "admitted", "admitted"]
            end = len(MAGIC) + sum(8 + len(record) for record in list(read_records(folder))[:3])
            (folder / JOURNAL).write_bytes(data[:end])
        client = open_client(folder)
    deadly = {saved.request.request_id: saved for saved in client.journal.saved}["deadly"]
    assert [output.finish_reason for output in deadly.outputs.values()] == ["error", "error"]
    assert "not tried again" in str(deadly.outputs[1].error_message)
    client.journal.sync()
    client.close()
    again = open_client(tmp_path / str(MAX_DEATHS))  # closed as it should be: no death
    assert {saved.deaths for saved in again.journal.saved} == {MAX_DEATHS}


def test_a_clean_end_is_no_death(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """Rolling restarts gave up requests that had waited through three of them."""
    client = open_client(tmp_path)
    client.submit(noted(request("r", tokens(20, 1), max_tokens=300, ignore_eos=True)), Sinks().take)
    for _ in range(MAX_DEATHS + 1):
        client.close()
        client = open_client(tmp_path)
        [saved] = client.journal.saved
        assert saved.ended is None


def test_other_models_and_other_builds(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """Token ids of one model were given to another one to go on with."""
    client = open_client(tmp_path / "a")
    client.submit(noted(request("r", tokens(20, 1), max_tokens=300, ignore_eos=True)), Sinks().take)
    client.journal.sync()
    folder = killed(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"'small'.*'other' cannot go on"):
        open_client(folder, Identity("another", "other", VOCAB, exact=True))
    newer = open_client(folder, Identity("another", "small", VOCAB, exact=True))
    assert [saved.exact for saved in newer.journal.saved] == [False]
    newer.close()
    [saved] = open_client(folder).journal.saved
    assert not saved.exact, "an answer that another build has worked on is not exact any more"


def test_a_folder_is_for_one_process(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """Two servers wrote into one file."""
    first = open_client(tmp_path)
    program = (
        "import sys; from headrace.engine.journal_file import FolderLock; from pathlib import Path\n"
        "FolderLock(Path(sys.argv[1]))"
    )
    other = [sys.executable, "-c", program, str(tmp_path)]
    failed = subprocess.run(other, capture_output=True, text=True, check=False)
    assert "in use by another process" in failed.stderr
    first.close()
    assert subprocess.run(other, check=False).returncode == 0


@pytest.mark.parametrize("what", ["a file", "not a journal"])
def test_what_cannot_be_a_journal_is_refused(
    what: str, open_client: Callable[..., JournaledClient], tmp_path: Path
) -> None:
    """A file of somebody's that happened to lie there was written over."""
    folder = tmp_path / "folder"
    if what == "a file":
        folder.write_text("text")
    else:
        folder.mkdir()
        (folder / JOURNAL).write_text("dear diary")
    with pytest.raises(ConfigError, match="folder"):
        open_client(folder)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), at=st.integers(0, 400), flip=st.integers(1, 255))
def test_no_bytes_can_hurt(data: bytes, at: int, flip: int) -> None:
    """A record that claimed four gigabytes, or whose bytes had rotted, must only end the reading."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / JOURNAL).write_bytes(MAGIC + data)
        assert sum(len(record) + 8 for record in read_records(folder)) <= len(data)
        journal = Journal(CheckpointConfig(name), IDENTITY)
        journal.admit(noted(request("r", tokens(30, 1))))
        journal.hear([EngineOutput(request_id="r", token_ids=tokens(30, 2))])
        journal.close()
        sound = list(read_records(folder))
        rotten = bytearray((folder / JOURNAL).read_bytes())
        if len(MAGIC) <= at < len(rotten):
            rotten[at] ^= flip
            (folder / JOURNAL).write_bytes(rotten)
            found = list(read_records(folder))
            assert found == sound[: len(found)] and len(found) < len(sound)
            Journal(CheckpointConfig(name), IDENTITY).close()


FULL_DISK = """
import logging, resource, sys, time
from headrace.engine.config import CheckpointConfig
from headrace.engine.journal import Journal
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams
from headrace.engine.saved import Identity
from headrace.errors import CheckpointError

logging.basicConfig(format="%(levelname)s %(message)s")
journal = Journal(CheckpointConfig(sys.argv[1], interval_s=0.0), Identity("f", "m", 64, True))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
for number in range(100):
    journal.admit(EngineRequest(
        request_id=f"r{number}", prompt_token_ids=[1] * 50, params=SamplingParams(seed=1), note=b"n"))
    journal.hear([EngineOutput(request_id=f"r{number}", token_ids=[2] * 50)])
try:
    journal.sync()
except CheckpointError as error:
    print("refused:", error)
print(journal.stats().broken)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
journal.sync()
print(journal.stats().broken, journal.stats().num_requests)
journal.close()
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A write that failed half way left a file that could not be read, or ended the writer for good."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "refused: The journal cannot be written: File too large.",
        "True",
        "False 100",
    ], done.stderr
    assert done.stderr.count("cannot be written") == 1, "one line says it"
    journal = Journal(CheckpointConfig(str(tmp_path)), Identity("f", "m", 64, exact=True))
    assert [saved.num_tokens for saved in journal.saved] == [50] * 100
    journal.close()


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Years of answers lay in a file of which a handful was of interest."""
    monkeypatch.setattr("headrace.engine.journal._LEAST_REWRITE", 20_000)
    journal = Journal(CheckpointConfig(str(tmp_path), interval_s=0.0), IDENTITY)
    journal.admit(noted(request("kept", tokens(30, 1))))
    for number in range(400):
        journal.admit(noted(request(f"r{number}", tokens(100, 1))))
        journal.hear([EngineOutput(request_id=f"r{number}", token_ids=tokens(20, 2))])
        journal.hear([EngineOutput(request_id="kept", token_ids=[number % VOCAB])])
        journal.drop(f"r{number}")
        if number % 20 == 0:
            journal.sync()
    journal.close()
    assert (tmp_path / JOURNAL).stat().st_size < 60_000
    journal = Journal(CheckpointConfig(str(tmp_path)), IDENTITY)
    [saved] = journal.saved
    assert saved.outputs[0].token_ids == [number % VOCAB for number in range(400)]
    journal.close()


@pytest.mark.parametrize("limits", [{"grace_s": 0.0}, {"max_bytes": 1200}], ids=["time", "size"])
def test_complete_answers_are_kept_within_bounds(limits: dict[str, Any], tmp_path: Path) -> None:
    """Answers that nobody came for filled the disk."""
    journal = Journal(CheckpointConfig(str(tmp_path), interval_s=0.0, **limits), IDENTITY)
    journal.admit(noted(request("runs", tokens(30, 1))))
    for number in range(9):
        journal.admit(noted(request(f"r{number}", tokens(30, 1))))
        journal.hear([EngineOutput(request_id=f"r{number}", token_ids=[1], finish_reason="stop")])
    journal.sync()
    until(lambda: journal.stats().num_requests < 6)
    journal.close()
    kept = [saved.request.request_id for saved in journal._requests.values()]
    assert kept[0] == "runs", "what is under way is never dropped for want of room"
    assert kept[1:] == [f"r{number}" for number in range(10 - len(kept), 9)], "the latest are kept"
    assert len(kept) == 1 or "max_bytes" in limits


def going_on(said: list[Any], **params: Any) -> EngineRequest:
    return msgspec.structs.replace(request("r", tokens(10, 1), **params), output_token_ids=said)


@pytest.mark.parametrize(
    ("said", "params"),
    [
        ([[1]], {"n": 2}),
        ([None], {}),
        ([[1, VOCAB]], {}),
        ([["a"]], {}),
        ([[1] * 5], {"max_tokens": 5}),
        ([7], {}),
    ],
)
def test_an_output_that_cannot_go_on_is_refused(said: list[Any], params: dict[str, Any]) -> None:
    """A choice that had all its tokens got one more."""
    engine: Engine = small_engine()
    with pytest.raises(InvalidRequestError, match=r"output_token_ids|max_tokens"):
        engine.add(going_on(said, **params))
    with pytest.raises(ContextLengthError):
        engine.add(going_on([[1] * 390], max_tokens=None))
    assert_idle(engine)


def test_a_context_that_shrank_ends_the_request_with_a_reason(
    open_client: Callable[..., JournaledClient],
) -> None:
    """A request that the new process refused was left hanging."""
    client, sinks = open_client(max_model_len=30), Sinks()
    saved = SavedRequest(noted(request("r", tokens(40, 1), n=2)), time.time())
    client.resume(saved, sinks.take, [0, 1])
    sinks.wait([("r", 0), ("r", 1)])
    last = sinks.answers["r", 1].last
    assert last is not None and last.error_kind == "ContextLengthError"


def test_an_engine_that_is_killed_alone(open_client: Callable[..., JournaledClient], tmp_path: Path) -> None:
    """Its requests ended with an error, and their owners, who tidied up, had the journal forget them."""
    spec = SimulatedSpec(
        num_blocks=256,
        max_model_len=400,
        scheduler=SchedulerConfig(),
        vocab_size=VOCAB,
        seed=0,
        step_s=0.01,
    )
    inner = ProcessClient(spec)
    client = JournaledClient(inner, Journal(CheckpointConfig(str(tmp_path), 0.0), IDENTITY))
    asked = [noted(request(f"r{i}", tokens(20, i), max_tokens=100, ignore_eos=True, n=2)) for i in range(3)]
    sinks = Sinks()
    for each in asked:
        client.submit(each, sinks.take)
    until(lambda: saved_tokens(client) > 30)
    os.kill(inner.pid, signal.SIGKILL)
    sinks.wait(keys_of(asked))
    assert {answer.finish_reason for answer in sinks.answers.values()} == {"error"}
    for each in asked:
        client.abort(each.request_id)
    client.close()
    closed = [msgspec.msgpack.decode(record) for record in read_records(tmp_path)][-1]
    assert closed == {"type": "closed", "clean": False}, "the server ended well, but one of these may kill"
    assert go_on(open_client(tmp_path)).texts() == run(small_engine(), asked).texts()
