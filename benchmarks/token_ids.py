"""What an engine gains when its prompt comes as token ids: `python -m benchmarks.token_ids URL`.

Asks a `headrace serve` (or vLLM) for one token after the same prompt, in turns as text and as ids, with the
prefix cache warm, so that as little as possible beside the tokenizer's work is measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx

_WORDS = ("mill", "water", "wheel", "stone", "river", "grain", "flour", "weir", "sluice", "paddle", "axle")


def _prompt(tokens: int) -> str:
    chosen = random.Random(1)
    return " ".join(chosen.choice(_WORDS) for _ in range(tokens))


def _timed_ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def main() -> None:
    """Print, for each length, the medians of both forms, of /tokenize, and of the difference in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the server's address, without /v1")
    parser.add_argument("--words", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def post(path: str, **body: Any) -> Any:
            return client.post(path, json={"model": model, **body}).raise_for_status().json()

        print("tokens  text ms  ids ms  /tokenize ms  saved ms (median of pairs)")
        for words in options.words:
            text = _prompt(words)
            ids = post("/tokenize", prompt=text)["tokens"]
            forms = [text, ids]
            for prompt in forms:
                post("/v1/completions", prompt=prompt, max_tokens=1)
            pairs, counted = [], []
            for number in range(options.pairs):
                order = forms if number % 2 else forms[::-1]
                took = [
                    _timed_ms(lambda prompt=prompt: post("/v1/completions", prompt=prompt, max_tokens=1))
                    for prompt in order
                ]
                pairs.append(took if number % 2 else took[::-1])
                counted.append(_timed_ms(lambda text=text: post("/tokenize", prompt=text)))
            medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
            saved = statistics.median(as_text - as_ids for as_text, as_ids in pairs)
            print(
                f"{len(ids):6}  {medians[0]:7.2f}  {medians[1]:6.2f}  {statistics.median(counted):12.2f}"
                f"  {saved:+8.2f}"
            )


if __name__ == "__main__":
    main()
