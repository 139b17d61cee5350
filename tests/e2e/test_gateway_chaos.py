"""Three replicas under load: one is killed, one hangs, fails, breaks its streams off. No client notices."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.faulty_proxy import LIMIT_S, Fault, FaultyProxy, Proxies
from tests.e2e.running import RunningServer
from tests.gateway.running import RunningGateway, events, gateway

MODEL = "smollm2-135m"
SERVER = ("--threads", "1", "--kv-cache-memory", "64MiB", "--log-level", "warning")
CLIENTS = 6
ANSWERS_A_PHASE = 4
KILL_AT = 4  # the phase that begins with a replica's death
DAILY_TOKENS = 100  # three answers, of which each reserves a token more than it uses
THE_SEA = 12  # number of a question that is asked as a whole, without a template around it
COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "ignore_eos": True}


def chat(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", COMMON | {"messages": [{"role": "user", "content": text}]} | more


QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    chat("Count from one to twenty.", temperature=0),
    chat("Name the planets.", temperature=0.8, seed=11, presence_penalty=0.5),
    ("/v1/completions", COMMON | {"prompt": "The sea was", "temperature": 0, "logprobs": 1}),
    chat("Tell me about rivers.", temperature=0, stop=["zebra", "the quick"]),
    chat("A number?", temperature=1, seed=4, structured_outputs={"regex": "[0-9]{6}(-[a-z]{4}){3}"}),
]


class Told:
    """What a client was told: text, log-probabilities, and the usage."""

    def __init__(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> None:
        said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        self.text = "".join(part.get("content") or "" for part in said)
        self.text += "".join(choice.get("text", "") for choice in choices)
        found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        self.logprobs = [value for each in found for value in each["token_logprobs"]]
        self.offsets = [value for each in found for value in each["text_offset"]]
        self.ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        self.roles = sum("role" in part for part in said)
        self.usage = usage

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Told)
        mine, theirs = self.__dict__ | {"usage": None}, other.__dict__ | {"usage": None}
        return mine == theirs

    def __repr__(self) -> str:
        return repr(self.__dict__)


def ask(client: httpx.Client, number: int, headers: dict[str, str] | None = None) -> httpx.Response:
    """Two of three are streams."""
    path, body = QUESTIONS[number % len(QUESTIONS)]
    if number % 3:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    return client.post(path, json=body, headers=headers)


def told(answer: httpx.Response) -> Told:
    """Asserts that a stream is whole: one id, one head for all chunks, [DONE] at its end, nothing else."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        return Told(body["choices"], body["usage"])
    *data, done = events(answer)
    assert done == "[DONE]", answer.text[-500:]
    chunks = [json.loads(one) for one in data]
    heads = {(one["id"], one["created"], one["model"], one["system_fingerprint"]) for one in chunks}
    assert len(heads) == 1, heads
    usage = [one["usage"] for one in chunks if one.get("usage")]
    choices = [choice for one in chunks for choice in one["choices"]]
    assert all(choice["index"] == 0 and "token_ids" not in choice for choice in choices)
    return Told(choices, usage[0] if usage else None)


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, made: RunningGateway, headers: dict[str, str]) -> None:
        self._made, self._headers = made, headers
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self.answers: list[tuple[int, httpx.Response]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._run) for _ in range(CLIENTS)]

    def _run(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            self.answers.append((number, ask(self._made.client, number, self._headers)))

    def wait(self, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something is true, or a client fails."""
        self._made.wait(lambda: true() or any(client.done() for client in self._clients), timeout_s)

    def more(self, answers: int = ANSWERS_A_PHASE) -> None:
        """Wait until so many more are here."""
        wanted = len(self.answers) + answers
        self.wait(lambda: len(self.answers) >= wanted)

    def stop(self) -> None:
        """Let clients finish what they asked. Raises what one of them met."""
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()


@pytest.fixture(scope="module")
def replicas(smollm2_path: Path) -> Iterator[list[RunningServer]]:
    """Three servers of one model, started side by side."""
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(3) as pool:
        starting = [stack.enter_context(_starting()) for _ in range(3)]
        list(pool.map(RunningServer.wait_ready, starting))
        yield starting


@contextlib.contextmanager
def _starting() -> Iterator[RunningServer]:
    server = RunningServer(MODEL, "--port", "0", *SERVER)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def config(proxies: list[FaultyProxy]) -> dict[str, Any]:
    models = {MODEL: {"price": {"input": 1.0, "output": 2.0}}}
    times = {"connect_s": 2.0, "first_byte_s": 6.0, "answer_s": 8.0, "idle_s": 2.0}
    health = {"probe_every_s": 0.5, "eject_after": 3, "eject_s": 0.5, "eject_max_s": 1, "recover_s": 0.5}
    return {
        "upstreams": {
            f"replica-{number}": {
                "url": f"{proxy.url}/v1",
                "kind": "headrace",
                "models": models,
                "timeouts": times,
            }
            for number, proxy in enumerate(proxies)
        },
        "tenants": {"acme": {}, "tight": {"limits": {"tokens_per_day": DAILY_TOKENS, "concurrency": 1}}},
        "cache": {"enabled": False},
        "health": health,
        "retries": {"attempts": 10, "budget": 1.0},
    }


def rows(made: RunningGateway, tenant: str) -> list[dict[str, Any]]:
    """The ledger's rows of a tenant."""
    with sqlite3.connect(made.state / "gateway.sqlite") as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM ledger WHERE tenant = ?", (tenant,))]


def test_no_client_notices(replicas: list[RunningServer], tmp_path: Path) -> None:
    with httpx.Client(base_url=replicas[0].url, timeout=60) as direct:
        undisturbed = [told(ask(direct, 1 + 3 * n)) for n in range(len(QUESTIONS))]
    expected = {(1 + 3 * n) % len(QUESTIONS): one for n, one in enumerate(undisturbed)}
    started = Proxies()
    proxies = [started.start(server.url) for server in replicas]
    with gateway(config(proxies), tmp_path) as made:
        acme, tight = made.key("acme"), made.key("tight")
        load = Load(made, acme)
        try:
            greedy_tenant = torment(load, proxies, replicas, lambda: ask(made.client, THE_SEA, tight))
        finally:
            load.stop()
        made.wait_idle()
        check_answers(load, expected)
        check_ledger(made, load)
        check_quota(made, greedy_tenant)
        assert sum(n for labels, n in made.metric("resumed_total").items() if "exact" in labels) > 0
        assert not any("text" in labels for labels in made.metric("resumed_total"))
        assert sum(proxy.cuts for proxy in proxies) > 0
    for server in replicas[:2]:
        server.wait_idle()
    started.stop()


def torment(
    load: Load, proxies: list[FaultyProxy], replicas: list[RunningServer], more: Callable[[], httpx.Response]
) -> list[httpx.Response]:
    """One replica at a time misbehaves, in every way; the third is killed. Answers of another tenant's."""
    others: list[httpx.Response] = []
    phases: list[tuple[int, Fault]] = [
        *((0, "half"), (1, "hang"), (2, "noise"), (1, "limit"), (0, "error"), (1, "half"), (0, "nonsense")),
    ]
    load.more()
    for step, (number, fault) in enumerate(phases):
        if step == KILL_AT:
            replicas[2].process.send_signal(signal.SIGKILL)
        proxies[number].fault = fault
        if fault in ("half", "noise"):
            wait_for_a_cut(load, proxies[number])
        others.append(more())
        load.more()
        proxies[number].fault = "none"
        if fault == "limit":
            time.sleep(LIMIT_S + 0.1)  # else nobody would be left for the next phase
    return others


def wait_for_a_cut(load: Load, proxy: FaultyProxy) -> None:
    before = proxy.cuts
    load.wait(lambda: proxy.cuts > before)


def check_answers(load: Load, expected: dict[int, Told]) -> None:
    for number, answer in load.answers:
        assert answer.status_code == 200, answer.text
        got, right = told(answer), expected[number % len(QUESTIONS)]
        if number % 3 == 0:  # whole
            assert (got.text, got.ends, got.logprobs) == (right.text, right.ends, right.logprobs)
        else:
            assert got == right, (number, got, right)
        if got.usage is not None:
            assert right.usage is not None
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert got.usage[name] == right.usage[name]


def check_ledger(made: RunningGateway, load: Load) -> None:
    """A row an answer, and what was told is what is written down."""
    written = rows(made, "acme")
    assert len(written) == len(load.answers)
    assert {row["outcome"] for row in written} == {"ok"}
    usages = [usage for _, answer in load.answers if (usage := told(answer).usage) is not None]
    # an upstream may die between the last word and the usage: then nobody was told, and the row says so
    known = [row for row in written if not row["estimated"]]
    assert len(known) == len(usages) >= len(written) - 2
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(row[name] for row in known) == sum(usage[name] for usage in usages)
    assert {row["resumed"] for row in written} <= {"", "exact", "again"}
    assert sum(row["nano_usd"] for row in known) == sum(
        1000 * usage["prompt_tokens"] + 2000 * usage["completion_tokens"] for usage in usages
    )


def check_quota(made: RunningGateway, answers: list[httpx.Response]) -> None:
    """The other tenant asked for more than it may use, and got what it may use."""
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    used = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows(made, "tight"))
    assert 0 < used <= DAILY_TOKENS


def test_with_nobody_else_to_go_to_it_is_one_error(replicas: list[RunningServer], tmp_path: Path) -> None:
    """With nobody else to go to, a broken stream is one error."""
    started = Proxies()
    proxy = started.start(replicas[0].url)
    proxy.fault = "half"
    with gateway(config([proxy]), tmp_path) as made:
        answer = ask(made.client, 1, made.key("acme"))
        assert answer.text.count("event: error") == 1
        assert "[DONE]" not in answer.text
        made.wait_idle()
    replicas[0].wait_idle()
    started.stop()
