"""Two gateways over one Redis: one is killed, Redis is killed, and what clients were told stays true."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.errors import ConfigError
from headrace.gateway.config import Limits, read_config
from headrace.gateway.quotas import Quotas, Scope
from tests.e2e.running import called
from tests.gateway.redis_server import Place, RunningRedis, redis
from tests.gateway.running import RunningGateway, Upstreams, decent, events, gateway
from tests.lab.streaming_server import Exchange

CLIENTS = 6
ANSWERS = 20  # before the kill, and behind it
AT_A_TIME = 3
DAILY = 120  # tokens: a third of what its clients would use
WORDS = 4


class Balancer:
    """A port that takes connections to whichever address takes them, in turns. It knows nothing of HTTP."""

    def __init__(self, ports: list[int]) -> None:
        self._turns = itertools.cycle(range(len(ports)))
        self._ports = ports
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        first = next(self._turns)
        with client:
            for number in range(len(self._ports)):
                with contextlib.suppress(OSError):
                    port = self._ports[(first + number) % len(self._ports)]
                    server = socket.create_connection(("127.0.0.1", port), 5)
                    break
            else:
                return
            with server:
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()

    def close(self) -> None:
        """Take no more."""
        self._socket.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Served:
    """An upstream that counts how many of a model's requests it works on before it answers, and holds those
    that are to wait.
    """

    def __init__(self) -> None:
        self.release = threading.Event()
        self.held = 0
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def __call__(self, exchange: Exchange) -> None:
        model = exchange.body["model"]
        self.running[model] += 1
        self.most[model] = max(self.most[model], self.running[model])
        try:
            if exchange.max_tokens == 1:  # only those that are to be held ask for so little
                self.held += 1
                while not self.release.is_set():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.005)
        finally:
            self.running[model] -= 1
        await decent(exchange)


class Client:
    """Asks, one connection a request, and asks anew where an answer broke off; keeps what it was told."""

    def __init__(self, url: str, headers: dict[str, str], model: str) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=60, headers=headers, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._body = {
            "model": model,
            "max_tokens": WORDS,
            "messages": [{"role": "user", "content": "a b c"}],
            "stream_options": {"include_usage": True},
        }
        self.told: dict[str, dict[str, int]] = {}  # usage by request
        self.broken: list[str] = []
        self.refused: Counter[str] = Counter()

    def ask(self, number: int) -> None:
        """One request; every other one is a stream."""
        name = f"{self._body['model']}-{uuid.uuid4()}"
        stream = bool(number % 2)
        body = self._body | {"stream": stream}
        if not stream:
            del body["stream_options"]
        try:
            answer = self._client.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
        except httpx.TransportError:
            self.broken.append(name)
            return
        if answer.status_code == 429:
            self.refused[answer.json()["error"]["message"].split(":")[0]] += 1
            time.sleep(0.01)
            return
        assert answer.status_code == 200, answer.text
        if not stream:
            self.told[name] = answer.json()["usage"]
            return
        *chunks, last = events(answer)
        assert last == "[DONE]", answer.text
        self.told[name] = json.loads(chunks[-1])["usage"]


def port_of(made: RunningGateway) -> int:
    return int(made.url.rsplit(":", 1)[1])


@contextlib.contextmanager
def pair(config: dict[str, Any], folder: Path) -> Iterator[tuple[RunningGateway, RunningGateway]]:
    for name in ("one", "two"):
        (folder / name).mkdir()
    with gateway(config, folder / "one") as one, gateway(config, folder / "two") as two:
        yield one, two


def ask_until(clients: list[Client], over: Callable[[], bool]) -> None:
    """Have all clients ask at the same time until something is true."""
    deadline = time.monotonic() + 120

    def work(client: Client) -> None:
        for number in itertools.count(len(client.told) + len(client.broken) + sum(client.refused.values())):
            if over():
                return
            assert time.monotonic() < deadline, [len(each.told) for each in clients]
            client.ask(number)

    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(work, client) for client in clients]:
            done.result()


def test_one_of_two_is_killed(upstreams: Upstreams, redis_server: RunningRedis, tmp_path: Path) -> None:
    """Clients that ask again go on; what they were told is in the ledger, once; nobody passes a limit.

    What the dead one held is free when its leases end.
    """
    served = Served()
    _, url = upstreams.start(served)
    where = Place(tmp_path, redis_server.url())
    config = {
        **where.config,
        "upstreams": {"one": {"url": url, "models": {name: {} for name in ("wide", "tight", "capped")}}},
        "tenants": {
            "wide": {"limits": {"tokens_per_day": 10**6}},
            "tight": {"limits": {"concurrency": AT_A_TIME}},
            "capped": {"limits": {"tokens_per_day": DAILY}},
        },
        "cache": {"enabled": False},
    }
    with pair(config, tmp_path) as (one, two):
        keys = {name: two.key(name) for name in config["tenants"]}
        balancer = Balancer([port_of(one), port_of(two)])
        clients = [Client(balancer.url, keys[name], name) for name in keys for _ in range(CLIENTS // 3)]

        def answered(model: str) -> int:
            return sum(len(client.told) for client in clients if client._body["model"] == model)

        ask_until(clients, lambda: min(answered("wide"), answered("tight")) >= ANSWERS)
        with ThreadPoolExecutor(2) as pool:
            held = [pool.submit(one.chat, keys["tight"], model="tight", max_tokens=1) for _ in range(2)]
            two.wait(lambda: served.held == 2)
            assert two.use("tenant:tight").running == 2
            left: list[int] = []

            def kill() -> None:
                one.process.send_signal(signal.SIGKILL)
                one.process.wait()
                left.append(two.use("tenant:tight").running)
                served.release.set()  # as an engine ends what nobody listens to

            before = answered("wide")
            killer = threading.Timer(0.05, kill)
            killer.start()
            ask_until(clients, lambda: answered("wide") >= before + ANSWERS and bool(left))
            assert left[0] >= 2, "what the dead one held is still reserved"
            assert all(isinstance(each.exception(), httpx.TransportError) for each in held)
        ask_until(clients, lambda: answered("tight") >= 2 * ANSWERS)
        two.wait_idle()
        balancer.close()
        check_ledger(two, clients)
        assert answered("capped") > 0
        assert served.most["tight"] <= AT_A_TIME

        async def later() -> None:
            async with where.opened(lambda: time.time() + 31) as store:
                scope = Scope("tenant:tight", Limits(concurrency=1))
                await Quotas(store).reserve("next", [scope], 1, 0)
                assert (await store.use("tenant:tight")).running == 1

        asyncio.run(later())


def check_ledger(made: RunningGateway, clients: list[Client]) -> None:
    """Each answer that a client had whole is one row; other rows are of those that broke off behind it."""
    rows = made.rows()
    written = {row["request"]: row for row in rows}
    assert len(written) == len(rows), "one row a request"
    told = {name: usage for client in clients for name, usage in client.told.items()}
    broken = {name for client in clients for name in client.broken}
    assert told.keys() <= written.keys()
    assert written.keys() - told.keys() <= broken
    for name, usage in told.items():
        assert written[name]["prompt_tokens"] == usage["prompt_tokens"]
        assert written[name]["completion_tokens"] == usage["completion_tokens"]
        assert not written[name]["estimated"]
    capped = [row for row in rows if row["tenant"] == "capped"]
    assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in capped) <= DAILY
    assert sum(client.refused["tenant"] for client in clients) > 0, "it wanted more than it may use"


def test_redis_is_killed_and_comes_back(upstreams: Upstreams, tmp_path: Path) -> None:
    """Nothing new is let in meanwhile. What runs ends well for its client, and is settled later."""
    served = Served()
    _, url = upstreams.start(served)
    (tmp_path / "redis").mkdir()
    with redis(tmp_path / "redis", "--appendfsync", "always") as server:
        config = {
            "store": server.url(),
            "upstreams": {"one": {"url": url, "models": {"m": {}}}},
            "tenants": {"acme": {"limits": {"tokens_per_day": 1000}}},
            "cache": {"enabled": False},
        }
        with gateway(config, tmp_path) as made, ThreadPoolExecutor(1) as pool:
            key = made.key("acme")
            assert made.chat(key).status_code == 200
            last = pool.submit(made.chat, key, max_tokens=1, stream=True)
            made.wait(lambda: served.held == 1)
            server.stop()
            refused = made.chat(key)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "state_unavailable"
            assert "retry-after" in refused.headers
            ready = made.client.get("/health/readiness")
            assert (ready.status_code, ready.json()["status"]) == (503, "no state")
            served.release.set()
            assert events(last.result())[-1] == "[DONE]"
            made.wait(lambda: made.metric("settlements_waiting") == {"": 1.0})
            server.start()
            made.wait(lambda: made.metric("settlements_waiting") == {"": 0.0})
            assert [row["completion_tokens"] for row in made.rows()] == [3, 1]
            used = made.use("tenant:acme")
            assert (used.running, used.tokens_today) == (0, 3 + 3 + 3 + 1)
            assert made.chat(key).status_code == 200
            assert made.client.get("/health/readiness").status_code == 200
            made.wait_idle()
            assert made.stop() == 0


def said(config: str, folder: Path, *command: str) -> str:
    """What a command says of a configuration that cannot be: one line, no traceback."""
    path = folder / "gateway.yaml"
    upstream = "{url: 'http://127.0.0.1:1/v1', models: {m: {}}}"
    path.write_text(f"upstreams: {{u: {upstream}}}\ntenants: {{acme: {{}}}}\n{config}\n")
    ended = called("gateway", *(command or ("keys", "list")), str(path))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    return ended.stderr


def test_a_password_comes_from_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis").mkdir()
    with redis(tmp_path / "redis", "--requirepass", "hunter2") as server:
        store = f"store: {server.url()}\nstore_password_env: REDIS_PASSWORD"
        assert "REDIS_PASSWORD must be set to the password of redis://" in said(store, tmp_path)
        monkeypatch.setenv("REDIS_PASSWORD", "hunter3")
        told = said(store, tmp_path, "run")
        assert "invalid username-password pair" in told
        assert "hunter" not in told
        monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
        assert called("gateway", "keys", "list", str(tmp_path / "gateway.yaml")).returncode == 0


def test_a_redis_that_forgets_or_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    forgetful = "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"
    with redis(tmp_path / "redis", *forgetful) as server:
        assert "set it to noeviction" in said(f"store: {server.url()}", tmp_path)
    assert "cannot be used: " in said(f"store: redis://127.0.0.1:{server.port}/0", tmp_path, "usage")


@pytest.mark.parametrize(
    ("store", "wrong"),
    [
        ("http://127.0.0.1:6379/0", "write the store's address like redis://"),
        ("redis://:secret@127.0.0.1:6379/0", "name its variable as store_password_env"),
        ("redis://127.0.0.1:6379/first", "first is no number of a Redis database"),
        ("redis://127.0.0.1:6379/0?ssl=no", "write the store's address like redis://"),
        ("redis://127.0.0.1:99999/0", "Port out of range"),
    ],
)
def test_mistakes_in_the_address_are_said_with_their_line(tmp_path: Path, store: str, wrong: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        f"upstreams: {{u: {{url: 'http://127.0.0.1:1/v1', models: {{m: {{}}}}}}}}\nstore: {store}\n"
    )
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert "gateway.yaml:2" in error.value.message
    assert wrong in error.value.message
    assert "secret" not in error.value.message.replace("store_password_env", "")


def test_tls_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path / "redis"
    folder.mkdir()
    kind = "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"
    subject = "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"
    files = "-keyout", str(folder / "key"), "-out", str(folder / "cert")
    subprocess.run(["openssl", "req", *kind, *files, *subject], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tls = "--tls-port", str(port), "--tls-cert-file", str(folder / "cert"), "--tls-key-file"
    with redis(folder, *tls, str(folder / "key"), "--tls-auth-clients", "no"):
        store = f"store: rediss://127.0.0.1:{port}/0"
        assert "certificate" in said(store, tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert"))
        assert called("gateway", "keys", "list", str(tmp_path / "gateway.yaml")).returncode == 0
