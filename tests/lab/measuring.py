"""Running a measurement inside a test, against servers in threads of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.result import Result
from headrace.lab.bench.run import Asked, Target, measure
from headrace.lab.bench.session import Plan
from tests.lab.streaming_server import Streamer
from tests.server.small_server import small_app, small_frontend


class Quiet:
    """A view that only remembers."""

    def __init__(self, while_running: Callable[[Load], None] = lambda load: None) -> None:
        self.results: list[StageResult] = []
        self.running = while_running

    def finished(self, result: StageResult) -> None:
        self.results.append(result)


@contextmanager
def running(streamer: Streamer) -> Iterator[str]:
    """``streamer`` in a thread; its address."""
    loop = asyncio.new_event_loop()
    server, port = loop.run_until_complete(streamer.listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def close() -> None:
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@contextmanager
def small_headrace(*, api_key: str | None = None, **engine: Any) -> Iterator[str]:
    """Our own server over the simulated runner and a byte tokenizer, on a port; its address."""
    frontend = small_frontend(**engine)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(small_app(frontend, api_key=api_key), log_level="error", lifespan="off", ws="none")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        frontend.client.close()


def bench(address: str, view: Quiet | None = None, **options: Any) -> Result:
    """Measure ``address``; ``options`` are fields of Plan, Asked and Target, with small defaults."""
    asked = {"prompt_tokens": Lengths("fixed", 32), "output_tokens": Lengths("fixed", 8)}
    target: dict[str, Any] = {"name": address, "address": address, "timeout_s": 60.0}
    plan: dict[str, Any] = {
        "kind": "closed",
        "levels": (2,),
        "duration_s": None,
        "requests": 8,
        "warmup_s": 0.0,
    }
    count_tokens, with_floor = options.pop("count_tokens", None), options.pop("with_floor", False)
    for name, value in options.items():
        for kind, fields in ((Asked, asked), (Target, target), (Plan, plan)):
            if name in kind.__annotations__:
                fields[name] = value
                break
        else:
            raise TypeError(name)
    work = measure(
        Target(**target),
        Asked(**asked),
        Plan(**plan),
        view or Quiet(),
        {},
        count_tokens,
        with_floor=with_floor,
    )
    return asyncio.run(work)
