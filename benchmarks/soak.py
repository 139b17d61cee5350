"""Thousands of short requests, mixed, over HTTP: does the server's resident memory stay where it was?

    python benchmarks/soak.py                       # starts `headrace serve`, 10,000 requests
    python benchmarks/soak.py --gateway             # the same through a gateway in the server
    python benchmarks/soak.py --gateway --requests 55000    # ten minutes on two cores
    python benchmarks/soak.py --url http://host:8000 --requests 500

Prints seconds, requests and the resident size, as /metrics tells it, after every fortieth of the requests,
then how much it grew, its trend, and whether it is flat. It fails (status 1) if it grew by more than
``--bound-mb`` after warm-up (the first fifth, and at least 200 requests), if a request had an unexpected
status, or if anything is left running or any block taken.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

WARM_UP = 200
WORDS = ("mill", "wheel", "river", "stone", "grain", "water", "gate", "channel", "flour", "sluice", "race")


def request(number: int) -> tuple[str, dict[str, Any], int]:
    """Path, body and expected status of the request of that number: every feature comes up in turn."""
    prompt = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 6)) + f" {number}"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1 + number % 4}
    kind = number % 12
    if kind in (1, 2):
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    elif kind == 3:
        body |= {"n": 2, "seed": number, "top_p": 0.9, "top_k": 40}
    elif kind == 4:
        body |= {"logprobs": 3, "min_p": 0.05}
    elif kind == 5:
        body |= {"stop": [" the", "\n"], "repetition_penalty": 1.2}
    elif kind == 6:
        body |= {"logit_bias": {str(number % 49152): 5}, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    elif kind == 7:
        body |= {"prompt": [prompt, prompt + " and"], "min_tokens": 1}
    elif kind == 8:
        body |= {"prompt": [number % 49000, 17, 42]}
    elif kind == 9:
        return "/v1/completions", body | {"repetition_penalty": 0}, 400
    elif kind in (10, 11):
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1 + number % 4}
        return "/v1/chat/completions", chat | {"stream": kind == 11, "logprobs": kind == 10}, 200
    return "/v1/completions", body, 200


class Soak:
    """One run against ``url``; ``check()`` raises SystemExit with what is wrong."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        self.wrong: list[str] = []
        self.sizes: list[tuple[int, float]] = []  # requests so far, MB resident
        self._began = time.monotonic()

    async def run(self, requests: int, concurrency: int) -> None:
        """All requests, ``concurrency`` at a time, noting the resident size now and then."""
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            numbers = iter(range(requests))
            every = max(requests // 40, 1)

            async def work() -> None:
                for number in numbers:
                    await self._one(client, number)
                    if (number + 1) % every == 0 or number + 1 == WARM_UP:
                        self.sizes.append((number + 1, await self._resident_mb(client)))
                        count, size = self.sizes[-1]
                        seconds = time.monotonic() - self._began
                        print(f"{seconds:7.1f} s {count:>7} requests {size:8.1f} MB", flush=True)

            await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        path, body, expected = request(number)
        body["model"] = self.model
        if number % 97 == 96:  # a client that leaves
            async with client.stream("POST", path, json=body | {"max_tokens": 400, "stream": True}) as answer:
                async for _ in answer.aiter_bytes():
                    break
            return
        answer = await client.post(path, json=body)
        text = answer.text
        if answer.status_code != expected:
            self.wrong.append(f"request {number}: status {answer.status_code}: {text[:200]}")
        elif body.get("stream") and expected == 200 and not text.endswith("data: [DONE]\n\n"):
            self.wrong.append(f"request {number}: the stream ends with {text[-100:]!r}")

    async def _resident_mb(self, client: httpx.AsyncClient) -> float:
        return _metric((await client.get("/metrics")).text, "headrace_device_memory_bytes") / 1e6

    def check(self, requests: int, bound_mb: float) -> list[str]:
        """What is wrong after the run; empty if nothing."""
        wrong = self.wrong[:5]
        first = max(requests // 5, min(WARM_UP, requests // 2))
        warm = sorted((count, mb) for count, mb in self.sizes if count >= first)
        grown = warm[-1][1] - warm[0][1]
        trend = statistics.linear_regression(*zip(*warm, strict=True)).slope if len(warm) > 2 else 0.0
        verdict = "flat" if grown <= bound_mb else "NOT flat"
        print(
            f"memory is {verdict}: {grown:+.1f} MB since warm-up (bound {bound_mb:g} MB), "
            f"{10_000 * trend:+.2f} MB for 10,000 requests"
        )
        if grown > bound_mb:
            wrong.append(f"resident size grew by {grown:.1f} MB, more than {bound_mb:g}")
        deadline = time.monotonic() + 10
        while left := _left_over(httpx.get(f"{self.url}/metrics").text):
            if time.monotonic() > deadline:
                wrong.append(f"left behind: {left}")
                break
            time.sleep(0.05)
        return wrong


def _metric(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    if found is None:
        raise SystemExit(f"/metrics has no {name}")
    return float(found[1])


def _left_over(page: str) -> str:
    under_way = ("requests_running", "requests_waiting", "upstream_requests", "upstream_tokens")
    for name in under_way:
        for value in re.findall(rf"^headrace_gateway_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE):
            if float(value):
                return f"the gateway's {name}: {value}"
    running = _metric(page, "vllm:num_requests_running") + _metric(page, "vllm:num_requests_waiting")
    taken = _metric(page, "headrace_kv_blocks_total") - _metric(page, "headrace_kv_blocks_free")
    return f"{running:g} sequences, {taken:g} blocks" if running or taken else ""


GATEWAY = """
authentication: none
tenants: {default: {limits: {requests_per_minute: 10000000, concurrency: 1000, budget_usd: 1000000}}}
"""


@contextmanager
def served(model: str, gateway: bool) -> Iterator[str]:
    """A server of our own, on a free port; ``gateway``: with quotas, cache and ledger in front."""
    command = [sys.executable, "-m", "headrace.cli", "serve", model, "--port", "0", "--log-level", "warning"]
    command += ["--kv-cache-memory", "64MiB"]  # whose pages are all touched while it warms up
    with tempfile.TemporaryDirectory() as folder:
        if gateway:
            file = Path(folder, "gateway.yaml")
            file.write_text(GATEWAY)
            command += ["--gateway", str(file)]
        yield from _running(command)


def _running(command: list[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        if found is None:
            raise SystemExit("headrace serve did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Parse, run, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server; default: start one")
    parser.add_argument("--model", default="smollm2-135m", help="what to serve without --url")
    parser.add_argument(
        "--gateway", action="store_true", help="without --url: start one with a gateway in it"
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--bound-mb", type=float, default=16.0)
    options = parser.parse_args()
    with nullcontext(options.url) if options.url else served(options.model, options.gateway) as url:
        soak = Soak(url)
        began = time.monotonic()
        asyncio.run(soak.run(options.requests, options.concurrency))
        print(f"{options.requests} requests in {time.monotonic() - began:.1f} s")
        wrong = soak.check(options.requests, options.bound_mb)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
