"""Time per output token of chats while long prompts come in, with and without a TPOT target.

``python benchmarks/ablations/adaptive_batching.py [--model smollm2-135m] [--seconds 40] [--chats 4]``. A few
clients chat without a pause; every few seconds another one sends a prompt of 2000 tokens that no cache has.
The target is ``--factor`` times the time per token of the same chats undisturbed, which is measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass, field

from headrace import SamplingParams
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.frontend.frontend import Frontend
from headrace.frontend.open import open_frontend

CHAT_TOKENS = 64
PROMPT_TOKENS = 2000


@dataclass
class Seen:
    """Seconds: a chat's per token and between any two tokens; to the first token of chats and books."""

    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    chat_ttft: list[float] = field(default_factory=list)
    book_ttft: list[float] = field(default_factory=list)


async def answer(frontend: Frontend, prompt: list[int], max_tokens: int) -> list[float]:
    """When each token of an answer came."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    async for outputs in frontend.stream(prompt, params):
        times += [time.monotonic()] * sum(len(output.token_ids) for output in outputs)
    return times


async def chat(frontend: Frontend, rng: random.Random, end: float, seen: Seen) -> None:
    """One client: a short prompt, an answer, and again."""
    while (started := time.monotonic()) < end:
        times = await answer(frontend, [rng.randrange(1000, 40_000) for _ in range(40)], CHAT_TOKENS)
        seen.chat_ttft.append(times[0] - started)
        seen.tpot.append((times[-1] - times[0]) / (len(times) - 1))
        seen.itl += [later - earlier for earlier, later in itertools.pairwise(times)]


async def read_books(frontend: Frontend, rng: random.Random, every_s: float, end: float, seen: Seen) -> None:
    """A prompt of 2000 tokens every few seconds."""

    async def book() -> None:
        started = time.monotonic()
        prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
        seen.book_ttft.append((await answer(frontend, prompt, 8))[0] - started)

    tasks = []
    while time.monotonic() + every_s < end:
        await asyncio.sleep(every_s)
        tasks.append(asyncio.create_task(book()))
    await asyncio.gather(*tasks)


async def run(frontend: Frontend, arguments: argparse.Namespace, books: bool, seconds: float) -> Seen:
    """What the clients see in so many seconds."""
    seen, end = Seen(), time.monotonic() + seconds
    clients = [chat(frontend, random.Random(number), end, seen) for number in range(arguments.chats)]
    if books:
        clients.append(read_books(frontend, random.Random(-1), arguments.every, end, seen))
    await asyncio.gather(*clients)
    return seen


def measured(arguments: argparse.Namespace, target_ms: float | None, books: bool, seconds: float) -> Seen:
    """Open an engine, warm it up, and measure."""
    frontend = open_frontend(
        ModelConfig(model=arguments.model, max_model_len=4096),
        CacheConfig(kv_cache_memory_bytes=512 * 2**20),
        SchedulerConfig(tpot_target_ms=target_ms),
    )
    try:
        asyncio.run(run(frontend, arguments, False, 3.0))
        return asyncio.run(run(frontend, arguments, books, seconds))
    finally:
        frontend.close()


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two long prompts")
    parser.add_argument("--factor", type=float, default=1.2, help="target over undisturbed time per token")
    arguments = parser.parse_args()

    quiet = measured(arguments, None, False, min(arguments.seconds, 10.0))
    undisturbed_ms = 1000 * statistics.median(quiet.tpot)
    target_ms = arguments.factor * undisturbed_ms
    print(f"undisturbed: {undisturbed_ms:.1f} ms a token with {arguments.chats} chats; below: ms")
    print(
        f"{'target':>10}{'TPOT p50':>10}{'p99':>8}{'p99/p50':>9}{'ITL p50':>9}{'p99':>8}{'max':>8}"
        f"{'answers':>9}{'chat TTFT s':>13}{'book TTFT s':>13}"
    )
    for target in (None, target_ms):
        seen = measured(arguments, target, True, arguments.seconds)
        p50, p99 = 1000 * percentile(seen.tpot, 0.5), 1000 * percentile(seen.tpot, 0.99)
        itl = [1000 * percentile(seen.itl, share) for share in (0.5, 0.99, 1.0)]
        print(
            f"{'none' if target is None else f'{target:.1f} ms':>10}{p50:10.1f}{p99:8.1f}{p99 / p50:9.2f}"
            f"{itl[0]:9.1f}{itl[1]:8.1f}{itl[2]:8.1f}{len(seen.tpot):9}"
            f"{statistics.median(seen.chat_ttft):13.2f}{statistics.median(seen.book_ttft):13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
