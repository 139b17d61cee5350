"""A gateway in a process of its own, and upstreams that do what a test tells them."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import httpx
import yaml

from headrace.cli.gateway_shared import with_store
from headrace.gateway.config import read_config
from headrace.gateway.keys import Key, Keys
from headrace.gateway.ledger import By, Entry, usage
from headrace.gateway.quotas import Use
from headrace.gateway.store import Store
from tests import http
from tests.e2e.running import COMMAND
from tests.lab.streaming_server import Behaviour, Exchange, Streamer


async def decent(exchange: Exchange) -> None:
    """What a good upstream answers: as many words as were asked for, usage where it is asked for."""
    body, tokens = exchange.body, exchange.max_tokens
    if exchange.path.endswith("/embeddings"):
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        data = [{"index": 0, "embedding": [0.5, 0.25], "object": "embedding"}]
        await exchange.whole(200, json.dumps({"object": "list", "data": data, "usage": usage}).encode())
    elif body.get("stream"):
        wanted = bool((body.get("stream_options") or {}).get("include_usage"))
        exchange.begin()
        for event in exchange.events([f"word{n} " for n in range(tokens)], usage=wanted):
            await exchange.send(event)
        await exchange.end()
    else:
        text = "".join(f"word{n} " for n in range(tokens))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        answer = {"object": "chat.completion", "choices": [choice], "usage": exchange.usage(tokens)}
        await exchange.whole(200, json.dumps(answer).encode())


_held: list[socket.socket] = []


def free_port() -> int:
    """A port for a server of ours, and for nobody else: it stays bound here, where nobody listens on it."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    _held.append(probe)
    return int(probe.getsockname()[1])


class Upstreams:
    """Streamers on one event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, behaviour: Behaviour = decent) -> tuple[Streamer, str]:
        """A new upstream; its ``behaviour`` may be changed while it runs. Its address ends in ``/v1``."""
        streamer = Streamer(behaviour=behaviour)
        _, port = asyncio.run_coroutine_threadsafe(streamer.listen(), self._loop).result(60)
        return streamer, f"http://127.0.0.1:{port}/v1"

    def stop(self) -> None:
        """End every connection, then the loop."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class RunningGateway:
    """``headrace gateway run`` on ``config``, whose state lies in ``folder``."""

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        env: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.file = folder / "gateway.yaml"
        self.file.write_text(yaml.safe_dump({"port": 0, **config}))
        self.state = folder / "gateway-state"
        self._log = (folder / "log").open("ab")
        self.process = subprocess.Popen(
            [*COMMAND, "gateway", "run", str(self.file), *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | (env or {}),
            text=True,
        )
        assert self.process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        line = lines.get(timeout=120)
        found = re.search(r"http://\S+", line)
        assert found is not None, (line, (folder / "log").read_text())
        self.url = found[0]
        self.client = http.client(self.url)

    def key(self, tenant: str, app: str = "") -> dict[str, str]:
        """A header with a new key of the tenant's, or of its app's."""
        _, secret = with_store(read_config(self.file), lambda store: Keys(store).create(tenant, app=app))
        return {"authorization": f"Bearer {secret}"}

    def revoke_last(self) -> Key:
        """Revoke the key that was made last."""

        async def revoke(store: Store) -> Key:
            key = (await Keys(store).all())[-1]
            await Keys(store).revoke(key.id)
            return key

        return with_store(read_config(self.file), revoke)

    def use(self, scope: str) -> Use:
        """What is used and reserved of a scope."""
        return with_store(read_config(self.file), lambda store: store.use(scope))

    def rows(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The ledger's rows, of one tenant or of all, oldest first."""

        async def read(store: Store) -> list[dict[str, Any]]:
            names = [field.name for field in fields(Entry)]
            async with store.ledger(0.0) as db:
                found = db.execute(f"SELECT {', '.join(names)} FROM ledger ORDER BY id").fetchall()
            return [dict(zip(names, row, strict=True)) for row in found]

        rows = with_store(read_config(self.file), read)
        return [row for row in rows if tenant in (None, row["tenant"])]

    def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """A chat of one message."""
        asked = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a b c"}], **body}
        return self.client.post("/v1/chat/completions", json=asked, headers=headers)

    def metric(self, name: str) -> dict[str, float]:
        """A metric's values by their labels, as the page writes them."""
        return metric_of(self.client.get("/metrics").text, name)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until every counter of what is under way is exactly 0."""
        names = ("requests_running", "requests_waiting", "upstream_requests", "upstream_tokens")

        def idle() -> bool:
            page = self.client.get("/metrics").text
            return all(value == 0 for name in names for value in metric_of(page, name).values())

        self.wait(idle, timeout_s)

    def wait(self, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something is true."""
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, self.client.get("/metrics").text
            time.sleep(0.01)

    def usage(self, by: By = "tenant") -> dict[str, dict[str, Any]]:
        """The ledger's sums."""
        found = with_store(read_config(self.file), lambda store: usage(store, by))
        return {row.group: asdict(row) for row in found}

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and wait; the exit status."""
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Gone, whatever happened."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


def metric_of(page: str, name: str) -> dict[str, float]:
    """A metric's values by their labels."""
    pattern = rf"^headrace_gateway_{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$"
    return {labels: float(value) for labels, value in re.findall(pattern, page, re.MULTILINE)}


@contextmanager
def gateway(
    config: dict[str, Any], folder: Path, env: dict[str, str] | None = None, arguments: Sequence[str] = ()
) -> Iterator[RunningGateway]:
    """A gateway that is ready, and gone afterwards."""
    running = RunningGateway(config, folder, env, arguments)
    try:
        yield running
    finally:
        running.close()


def begin(
    made: RunningGateway, route: str, body: dict[str, Any], headers: dict[str, str]
) -> Callable[[], None]:
    """Ask, and wait for no answer; what comes back is a way to leave."""
    url = httpx.URL(made.url)
    content = json.dumps(body).encode()
    head = {"host": url.netloc.decode(), "content-length": str(len(content)), **headers}
    lines = [f"POST /v1/{route} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    asking = socket.create_connection((url.host, url.port or 80))
    asking.sendall("\r\n".join(lines).encode() + content)
    return asking.close


def events(answer: httpx.Response) -> list[str]:
    """The data of a stream's events; asserts that nothing else is in it."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    out = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        assert all(line.startswith(("data: ", "event: error")) for line in lines), block
        out.append("".join(line[6:] for line in lines if line.startswith("data: ")))
    return out


def text_of(answer: httpx.Response) -> str:
    """A good stream's text. Asserts that it is whole: a finish reason, then [DONE], no error, no more."""
    *chunks, last = events(answer)
    assert last == "[DONE]", last
    read = [json.loads(chunk) for chunk in chunks]
    choices = [choice for chunk in read for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["length"]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def is_error_stream(answer: httpx.Response) -> bool:
    """Whether a stream ended in exactly one error event and no [DONE]."""
    *chunks, last = events(answer)
    assert all("error" not in json.loads(chunk) for chunk in chunks if chunk != "[DONE]")
    return "[DONE]" not in chunks and last != "[DONE]" and "message" in json.loads(last)["error"]
