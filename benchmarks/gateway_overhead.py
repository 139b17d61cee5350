"""What the gateway costs: latency beside asking the upstream directly, requests and chunks a second.

Run it in a clone with the dev extra installed, on a quiet machine: ``python benchmarks/gateway_overhead.py``.
The upstream answers at once and only that; the gateway has keys, quotas, prices, the ledger and logs on. The
gateway is kept to one core, upstream and client to the others. Bars: at 300 requests/s p50 of what the
gateway adds at most 1.5 ms and p99 at most 6 ms; at least 800 whole answers a second and 20,000 chunks a
second on its one core. Exit status 1 if one is missed. ``kept`` are requests that the cache may answer
(temperature 0) and has not seen, so that it looks for each, leads a flight for it and stores its answer;
``hit`` is one that it has, and all of its time, since no upstream is asked. ``--store redis://…`` measures
over a Redis, for which these are no bars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import uvloop

CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "noop"}
USAGE = {"prompt_tokens": 20, "completion_tokens": 16, "total_tokens": 36}
CONFIG = """
upstreams: {{noop: {{url: "{}", models: {{noop: {{price: {{input: 1, output: 2}}}}}}}}}}
tenants:
  acme:
    limits:
      requests_per_minute: 10000000
      tokens_per_minute: 10000000000
      tokens_per_day: 100000000000
      concurrency: 10000
      budget_usd: 1000000
"""
Cached = Literal["no", "kept", "hit"]
"""Whether the cache has to do with a request: not at all, it keeps a new one's answer, or it has it."""
COMMAND = [sys.executable, "-m", "headrace.cli", "gateway"]


def _answer(body: dict[str, object]) -> bytes:
    """A response on a connection that stays open."""
    count = int(str(body.get("max_completion_tokens") or 16))
    if not body.get("stream"):
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "w " * count},
            "finish_reason": "length",
        }
        whole = json.dumps({"choices": [choice], "usage": USAGE}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(whole)}\r\n\r\n"
        return head.encode() + whole
    piece = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
    events = [{**CHUNK, "choices": [piece]}] * count
    events.append({**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    events.append({**CHUNK, "choices": [], "usage": USAGE})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n\r\n"


async def _serve() -> None:
    made: dict[bytes, bytes] = {}

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if body not in made:
                    made[body] = _answer(json.loads(body or b"{}"))
                writer.write(made[body])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass
class Client:
    """Asks ``url`` the same over and over."""

    session: aiohttp.ClientSession
    url: str
    headers: dict[str, str]
    asked: int = 0

    async def ask(self, *, stream: bool, tokens: int = 16, cached: Cached = "no") -> tuple[float, int]:
        """Seconds of one request, and how many events came."""
        self.asked += 1
        number = f" {self.url} {self.asked}" if cached == "kept" else ""
        body = {
            "model": "noop",
            "stream": stream,
            "max_completion_tokens": tokens,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": f"What is a mill wheel, and what does it do?{number}"}],
        }
        if cached != "no":
            body["temperature"] = 0
        began = time.perf_counter()
        async with self.session.post(
            f"{self.url}/chat/completions", json=body, headers=self.headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            events = 0
            async for part in answer.content.iter_any():
                events += part.count(b"data: ")
        return time.perf_counter() - began, events

    async def open_loop(
        self, rate: float, seconds: float, *, stream: bool, cached: Cached = "no"
    ) -> list[float]:
        """Latencies at a steady rate, sorted."""
        loop = asyncio.get_running_loop()
        began, tasks = loop.time(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(began + number / rate - loop.time(), 0.0))
            tasks.append(asyncio.create_task(self.ask(stream=stream, cached=cached)))
        return sorted(latency for latency, _ in await asyncio.gather(*tasks))

    async def closed_loop(
        self, ask: Callable[[], Awaitable[tuple[float, int]]], users: int, seconds: float
    ) -> tuple[float, float]:
        """Requests and events a second."""
        until = time.perf_counter() + seconds

        async def user() -> tuple[int, int]:
            requests = events = 0
            while time.perf_counter() < until:
                events += (await ask())[1]
                requests += 1
            return requests, events

        began = time.perf_counter()
        counts = await asyncio.gather(*(user() for _ in range(users)))
        took = time.perf_counter() - began
        return sum(count[0] for count in counts) / took, sum(count[1] for count in counts) / took


def _percentile(values: list[float], share: float) -> float:
    return 1000 * values[min(int(len(values) * share), len(values) - 1)]


async def _measure(direct: str, gateway: str, key: str, options: argparse.Namespace) -> dict[str, float]:
    out: dict[str, float] = {}
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        through = Client(session, gateway, headers)
        beside = Client(session, direct, headers)
        await through.open_loop(options.rate, 2.0, stream=True)  # warms both up
        for name, stream in (("whole", False), ("stream", True)):
            alone = await beside.open_loop(options.rate, options.seconds, stream=stream)
            added = await through.open_loop(options.rate, options.seconds, stream=stream)
            for share in (0.5, 0.99):
                label = f"{name} p{share * 100:g}"
                out[label] = _percentile(added, share) - _percentile(alone, share)
        alone = await beside.open_loop(options.rate, options.seconds, stream=True, cached="kept")
        added = await through.open_loop(options.rate, options.seconds, stream=True, cached="kept")
        await through.ask(stream=True, cached="hit")
        hits = await through.open_loop(options.rate, options.seconds, stream=True, cached="hit")
        for share in (0.5, 0.99):
            out[f"kept p{share * 100:g}"] = _percentile(added, share) - _percentile(alone, share)
            out[f"hit p{share * 100:g}"] = _percentile(hits, share)
        out["requests/s"], _ = await through.closed_loop(
            lambda: through.ask(stream=False), 16, options.seconds
        )
        _, out["chunks/s"] = await through.closed_loop(
            lambda: through.ask(stream=True, tokens=2000), 8, options.seconds
        )
    return out


def main() -> int:
    """Print the figures; 0 if the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--store", metavar="URL", help="a Redis, in the place of a file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(_serve())
        return 0
    started = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            upstream = subprocess.Popen(
                [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
            )
            started.append(upstream)
            assert upstream.stdout is not None
            direct = f"http://127.0.0.1:{int(upstream.stdout.readline())}/v1"
            config = Path(folder, "gateway.yaml")
            store = f"store: {options.store}\n" if options.store else ""
            config.write_text(CONFIG.format(direct) + store)
            key = subprocess.check_output(
                [*COMMAND, "keys", "create", str(config), "--tenant", "acme"], text=True
            ).strip()
            with Path(folder, "log").open("wb") as log:
                command = [*COMMAND, "run", str(config), "--port", "0"]
                running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            started.append(running)
            assert running.stdout is not None
            gateway = running.stdout.readline().split()[-1] + "/v1"
            first, *others = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(running.pid, {first})
            os.sched_setaffinity(upstream.pid, set(others) or {first})
            os.sched_setaffinity(0, set(others) or {first})
            figures = uvloop.run(_measure(direct, gateway, key, options))
    finally:
        for process in started:
            process.terminate()
            process.wait()
    return _print(figures, options.rate)


def _print(figures: dict[str, float], rate: float) -> int:
    bars = {"p50": 1.5, "p99": 6.0}
    missed = 0
    for name, value in figures.items():
        least = {"requests/s": 800.0, "chunks/s": 20_000.0}.get(name)
        if least is None:
            most = bars[name.split()[1]]
            word = "in all" if name.startswith("hit") else "added"
            met, text = value <= most, f"{value:.2f} ms {word} at {rate:g}/s (bar: {most:g} ms)"
        else:
            met, text = value >= least, f"{value:,.0f} (bar: {least:,.0f})"
        missed += not met
        print(f"{name:14} {text:46} {'met' if met else 'MISSED'}")
    print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
