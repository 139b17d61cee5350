"""Tokens a second with and without prompt lookup, on a task that copies and on one that does not.

``python benchmarks/ablations/speculation.py [--model smollm2-135m] [--runs 7] [--concurrency 1 4]``. Both
engines are loaded at once and take turns, so that a busy moment of the machine hits both; medians are
compared. Each run asks for the same tokens, and the script fails if the answers differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from headrace import LLM, SamplingParams

LEDGER = """The harbour master keeps a ledger of every vessel that enters the bay. Each entry names
the ship, its captain, the port it sailed from and the cargo it carries. On the third of May the
brig Adelaide arrived from Lisbon with cork, salt and oranges under Captain Moreira. On the fifth
the schooner Wren came in from Bergen with dried cod and timber under Captain Solheim. On the ninth
the barque Constance put in for repairs after losing her foremast in a gale off Ushant. Her cargo of
Baltic hemp was dry, and she sailed again on the fourteenth."""

TASKS = {
    "copies": f"Repeat the following text exactly, word for word:\n\n{LEDGER}",
    "does not copy": "Write a story about a lighthouse keeper who learns to cook.",
}


def tokens_per_second(llm: LLM, task: str, params: SamplingParams, concurrency: int) -> tuple[float, Any]:
    """Output tokens of ``concurrency`` equal chats over the time that they take, and the answers."""
    chats = [[{"role": "user", "content": task}]] * concurrency
    start = time.perf_counter()
    answers = llm.chat(chats, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    ids = [answer.outputs[0].token_ids for answer in answers]
    return sum(map(len, ids)) / elapsed, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"}, help="speculative_config")
    arguments = parser.parse_args()

    common: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 * 2**20}
    plain = LLM(arguments.model, **common)
    drafting = LLM(arguments.model, speculative_config=arguments.config, **common)
    print(f"{'task':15}{'temp.':>6}{'streams':>9}{'off':>9}{'on':>9}{'on/off':>9}{'accepted':>10}")
    for name, task in TASKS.items():
        for temperature in (0.0, 1.0):
            for concurrency in arguments.concurrency:
                params = SamplingParams(
                    max_tokens=arguments.max_tokens, temperature=temperature, seed=1, ignore_eos=True
                )
                before = drafting.stats()
                speeds: dict[bool, list[float]] = {False: [], True: []}
                for run in range(arguments.runs + 1):
                    without, expected = tokens_per_second(plain, task, params, concurrency)
                    with_drafts, ids = tokens_per_second(drafting, task, params, concurrency)
                    assert ids == expected, "speculation changed an answer"
                    if run:  # the first one warms up
                        speeds[False].append(without)
                        speeds[True].append(with_drafts)
                after = drafting.stats()
                off, on = statistics.median(speeds[False]), statistics.median(speeds[True])
                drafted = after.draft_tokens - before.draft_tokens
                accepted = after.draft_tokens_accepted - before.draft_tokens_accepted
                share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "none"
                print(
                    f"{name:15}{temperature:6.1f}{concurrency:9}{off:9.1f}{on:9.1f}{on / off:9.2f}  {share}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
