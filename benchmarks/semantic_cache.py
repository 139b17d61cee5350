"""How often the semantic cache hits, and how often it is wrong, beside a cache that goes by similarity only.

Run it in a clone with the dev extra installed: ``python -m benchmarks.semantic_cache``. The pairs are ours
(``data/paraphrases.jsonl``): 60 questions, each with ways to ask the same and near-misses that differ by a
negation, a number, a name, a unit, a time, who does what to whom. Real parts: ``headrace serve minilm-l6``
embeds, ``headrace gateway run`` caches; the model behind it is a stand-in that knows which questions mean the
same and words its answers in three ways. Every text is asked once, in an order drawn anew for each seed:
first the learning part, on which the cache may find its thresholds, then the held-out part, which alone
counts. Nothing that is printed depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import yaml
from aiohttp import web

from headrace.gateway.verifier import read, refusal

DATA = Path(__file__).parent / "data" / "paraphrases.jsonl"
COMMAND = [sys.executable, "-m", "headrace.cli"]
WORDINGS = ("The answer is {}.", "It is {}.", "The answer to this question is {}.")
THRESHOLDS = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.98)
BUDGETS = (0.01, 0.02, 0.05, 0.10)


def meanings(part: str) -> dict[str, int]:
    """Every text of a part ("learn" or "held-out"), and a number that texts of one meaning share."""
    rows = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
    out: dict[str, int] = {}
    number = 100 if part == "learn" else 1000
    for row in rows:
        if row["part"] == part:
            for group in ([row["question"], *row["same"]], *([text] for _, text in row["near"])):
                number += 1
                out |= dict.fromkeys(group, number)
    return out


def answer_to(text: str, meaning: int) -> str:
    """What the stand-in for a model says: the same for the same meaning, in other words."""
    return WORDINGS[zlib.crc32(text.encode()) % len(WORDINGS)].format(meaning * 37)


@dataclass
class Score:
    """Of ``asked`` texts, ``possible``: for which a text of the same meaning was there already."""

    asked: int = 0
    possible: int = 0
    hits: int = 0
    wrong: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among all."""
        return self.hits / max(self.asked, 1)

    @property
    def false_hit_rate(self) -> float:
        """Wrong ones among the hits: what ``max_false_hit_rate`` bounds."""
        return self.wrong / max(self.hits, 1)

    @property
    def found(self) -> float:
        """Right hits among the possible ones."""
        return (self.hits - self.wrong) / max(self.possible, 1)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.asked + other.asked,
            self.possible + other.possible,
            self.hits + other.hits,
            self.wrong + other.wrong,
        )


def score(asked: Iterable[tuple[str, int | None]], known: dict[str, int]) -> Score:
    """Of texts in the order in which they were asked, each with the meaning of the answer that it got out of
    the cache, or None.
    """
    seen: set[int] = set()
    made = Score()
    for text, got in asked:
        meaning = known[text]
        made += Score(1, meaning in seen, got is not None, got is not None and got != meaning)
        seen.add(meaning)
    return made


def similarity_only(
    texts: Sequence[str],
    vectors: dict[str, npt.NDArray[np.float32]],
    threshold: float,
    *,
    verify: bool = False,
) -> list[tuple[str, str | None]]:
    """A cache with one threshold for all: each text with the kept one whose answer it gets. ``verify``: but
    not where our verifier refuses.
    """
    out: list[tuple[str, str | None]] = []
    kept: list[str] = []
    for text in texts:
        near = np.array([vectors[other] @ vectors[text] for other in kept])
        hit = None
        for place in np.argsort(-near)[:8]:
            if near[place] < threshold:
                break
            if not verify or refusal(read(kept[place]), read(text)) is None:
                hit = kept[place]
                break
        if hit is None:
            kept.append(text)
        out.append((text, hit))
    return out


def order(seed: int) -> tuple[list[str], list[str]]:
    """The learning part and the held-out part, shuffled."""
    parts = []
    for part in ("learn", "held-out"):
        texts = sorted(meanings(part))
        random.Random(f"{part} {seed}").shuffle(texts)
        parts.append(texts)
    return parts[0], parts[1]


def config_of(upstream: str, encoder: str, budget: float) -> dict[str, Any]:
    """A gateway's settings: nothing is left to chance or to time."""
    return {
        "port": 0,
        "authentication": "none",
        "upstreams": {
            "model": {"url": upstream, "models": {"m": {}}},
            "encoder": {"url": encoder, "kind": "headrace", "models": {"minilm-l6": {}}},
        },
        "embeddings": {"model": "minilm-l6", "timeout_ms": 60_000},
        "cache": {"semantic": {"max_false_hit_rate": budget, "explore": 0, "by_default": True}},
    }


async def _start_model(known: dict[str, int]) -> tuple[web.AppRunner, str]:
    async def chat(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][-1]["content"]
        message = {"role": "assistant", "content": answer_to(text, known[text])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", lambda _: web.json_response({"data": []}))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}/v1"


class Process:
    """A headrace command that serves; ``url`` is what it prints."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        found = None
        for line in self._process.stdout:
            if (found := re.search(r"http://[^ /\n]+", line)) is not None:
                break
        if found is None:
            raise SystemExit(f"headrace {' '.join(arguments)} did not start")
        self.url = found[0]

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


async def _embed(
    session: aiohttp.ClientSession, url: str, texts: list[str]
) -> dict[str, npt.NDArray[np.float32]]:
    out = {}
    for begin in range(0, len(texts), 64):
        part = texts[begin : begin + 64]
        async with session.post(f"{url}/v1/embeddings", json={"model": "minilm-l6", "input": part}) as answer:
            data = (await answer.json())["data"]
        out |= {text: np.array(item["embedding"], np.float32) for text, item in zip(part, data, strict=True)}
    return out


async def _ask(session: aiohttp.ClientSession, url: str, text: str) -> int | None:
    """The meaning of the answer out of the cache; None if the model was asked."""
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": text}]}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        told = await answer.json()
        if answer.headers["x-headrace-cache"] == "semantic-hit":
            return int(re.findall(r"\d+", told["choices"][0]["message"]["content"])[0]) // 37
    while True:  # until it has learned from the answer
        async with session.get(f"{url}/metrics") as page:
            if "headrace_gateway_semantic_learning 0.0" in await page.text():
                return None
        await asyncio.sleep(0.002)


async def _measure(budget: float, seed: int, model: str, encoder: str, known: dict[str, int]) -> Score:
    learn, held_out = order(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway.yaml"
        path.write_text(yaml.safe_dump(config_of(model, f"{encoder}/v1", budget)))
        gateway = Process("gateway", "run", str(path), "--log-level", "error")
        try:
            async with aiohttp.ClientSession() as session:
                for text in learn:
                    await _ask(session, gateway.url, text)
                return score([(text, await _ask(session, gateway.url, text)) for text in held_out], known)
        finally:
            gateway.stop()


async def _run(seeds: int, budgets: Sequence[float], picture: Path | None) -> None:
    known = meanings("learn") | meanings("held-out")
    runner, model = await _start_model(known)
    encoder = Process("serve", "minilm-l6", "--port", "0")
    rows: list[tuple[str, str, Score]] = []
    try:
        async with aiohttp.ClientSession() as session:
            vectors = await _embed(session, encoder.url, sorted(known))
        for verify in (False, True):
            name = "similarity and verifier" if verify else "similarity only"
            for threshold in THRESHOLDS:
                total = Score()
                for seed in range(seeds):
                    learn, held_out = order(seed)
                    got = similarity_only(learn + held_out, vectors, threshold, verify=verify)[len(learn) :]
                    total += score([(text, None if hit is None else known[hit]) for text, hit in got], known)
                rows.append((name, f"threshold {threshold:.2f}", total))
        for budget in budgets:
            total = Score()
            for seed in range(seeds):
                total += await _measure(budget, seed, model, encoder.url, known)
            rows.append(("headrace", f"budget {budget:.0%}", total))
    finally:
        encoder.stop()
        await runner.cleanup()
    print(
        "| cache | setting | hit rate | right hits of possible | false hits of hits |\n|---|---|---|---|---|"
    )
    for name, setting, made in rows:
        print(f"| {name} | {setting} | {made.hit_rate:.1%} | {made.found:.1%} | {made.false_hit_rate:.1%} |")
    if picture is not None:
        _draw(rows, picture)


def _draw(rows: list[tuple[str, str, Score]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, mark in (("similarity only", "o-"), ("similarity and verifier", "s-"), ("headrace", "D-")):
        points = [(made.found, made.false_hit_rate, setting) for who, setting, made in rows if who == name]
        axes.plot([100 * x for x, _, _ in points], [100 * y for _, y, _ in points], mark, label=name)
        for x, y, setting in points:
            text = setting.split()[1]
            axes.annotate(text, (100 * x, 100 * y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set_xlabel("right hits, % of possible ones")
    axes.set_ylabel("false hits, % of hits")
    axes.set_ylim(bottom=-1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print one table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="orders in which the texts are asked")
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=BUDGETS, help="values of max_false_hit_rate"
    )
    parser.add_argument("--picture", type=Path, help="draw the curve into this PNG file")
    options = parser.parse_args()
    asyncio.run(_run(options.seeds, options.budgets, options.picture))


if __name__ == "__main__":
    main()
