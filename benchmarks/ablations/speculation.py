"""Tokens a second with and without speculation, on tasks that copy and on some that do not.

``python benchmarks/ablations/speculation.py [--model smollm2-135m] [--runs 7] [--concurrency 1 4]``, and
``--tasks "edit code" "a story"`` for some of those in ``copy_tasks.py``. Both engines are loaded at once and
take turns, so that a busy moment of the machine hits both; medians are compared. Each run asks for the same
tokens, and the script fails if the answers differ.

``--padded 7``: a draft model and a target of seven times its layers, whose cost dominates. There is no such
pair of trained models in the catalogue, so the target is the model itself with layers that add nothing to
what it says, and read as many weights as the others. Its costs are those of a real pair. How often drafts are
right is not: at temperature 0 always, which no real pair is; with the temperature ever less often, as the
target samples and the draft does not. Read the speed beside the acceptance that the table shows.
A draft model that was made for it (``headrace compress draft``) goes into ``--config '{"model": FOLDER}'``:
then the acceptance is a real pair's, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from copy_tasks import TASKS

from headrace import LLM, SamplingParams
from headrace.backend import open_runner
from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.runner import RunnerSettings
from headrace.engine.config import SchedulerConfig, SpeculativeConfig
from headrace.engine.draft_build import plan_draft
from headrace.engine.engine import Engine
from headrace.engine.thread_client import ThreadClient
from headrace.frontend.frontend import Frontend
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model import store
from headrace.model.checkpoint import Checkpoint, Tensor
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint

MAX_MODEL_LEN = 2048


class Padded:
    """A checkpoint with so many times the layers, the further ones of which add zeros to the residual stream.

    Implements headrace.model.checkpoint.Checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, times: int) -> None:
        self._checkpoint = checkpoint
        self._times = times
        self._layers = len(checkpoint.architecture.layers)
        self.path = checkpoint.path
        self.architecture = replace(checkpoint.architecture, layers=checkpoint.architecture.layers * times)

    def names(self) -> tuple[str, ...]:
        """See Checkpoint."""
        own = self._checkpoint.names()
        return own + tuple(
            f"layers.{copy * self._layers + int(number)}.{rest}"
            for copy in range(1, self._times)
            for name in own
            if name.startswith("layers.")
            for _, number, rest in [name.split(".", 2)]
        )

    def tensor(self, name: str) -> Tensor:
        """See Checkpoint."""
        if not name.startswith("layers."):
            return self._checkpoint.tensor(name)
        _, number, rest = name.split(".", 2)
        tensor = self._checkpoint.tensor(f"layers.{int(number) % self._layers}.{rest}")
        if int(number) < self._layers or rest not in ("attention.o.weight", "feed_forward.down.weight"):
            return tensor
        if not isinstance(tensor, QuantTensor):
            return np.zeros_like(tensor)
        minimum = None if tensor.minimum is None else np.zeros_like(tensor.minimum)
        return replace(tensor, scale=np.zeros_like(tensor.scale), minimum=minimum)

    def fingerprint(self) -> str:
        """See Checkpoint."""
        return f"{self._checkpoint.fingerprint()} padded {self._times}"


def padded_pair(path: Path, times: int, config: dict[str, Any] | None) -> LLM:
    """The model with ``times`` its layers and, as ``config`` says, a draft model: by default itself."""
    target = Padded(open_checkpoint(path), times)
    speculative = SpeculativeConfig.of(config and {"model": str(path)} | config | {"method": "draft_model"})
    scheduler = SchedulerConfig(max_num_seqs=8, max_queue_time_s=1e9, speculative=speculative)
    settings = RunnerSettings(
        num_blocks=8 * MAX_MODEL_LEN // BLOCK_SIZE,
        max_batch_tokens=scheduler.max_num_batched_tokens,
        max_sequences=scheduler.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_logit_rows=scheduler.max_num_seqs + 64,
    )
    draft = plan_draft(speculative, target.architecture, settings)
    runner = open_runner(target, "cpu", settings)
    drafter = None if draft is None else draft.open("cpu", target.architecture.vocab_size, True)
    engine = Engine(runner, settings, scheduler, drafter=drafter)
    return LLM.from_frontend(Frontend(ThreadClient(engine), load_tokenizer(path), "padded"), scheduler)


def tokens_per_second(llm: LLM, prompt: str, params: SamplingParams, concurrency: int) -> tuple[float, Any]:
    """Output tokens of ``concurrency`` equal chats over the time that they take, and the answers."""
    chats = [[{"role": "user", "content": prompt}]] * concurrency
    start = time.perf_counter()
    answers = llm.chat(chats, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    ids = [answer.outputs[0].token_ids for answer in answers]
    return sum(map(len, ids)) / elapsed, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tasks", nargs="+", help="of: " + ", ".join(task.name for task in TASKS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--config", type=json.loads, default={"method": "ngram"}, help="speculative_config")
    parser.add_argument("--padded", type=int, metavar="TIMES", help="a draft model and TIMES its layers")
    arguments = parser.parse_args()

    if arguments.padded:
        path = store.resolve(arguments.model)
        plain = padded_pair(path, arguments.padded, None)
        drafting = padded_pair(path, arguments.padded, arguments.config)
    else:
        common: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 256 * 2**20}
        plain = LLM(arguments.model, **common)
        drafting = LLM(arguments.model, speculative_config=arguments.config, **common)
    print(f"{'task':15}{'temp.':>6}{'streams':>9}{'off':>9}{'on':>9}{'on/off':>9}{'accepted':>10}")
    for task in TASKS:
        if arguments.tasks and task.name not in arguments.tasks:
            continue
        for temperature in arguments.temperatures:
            for concurrency in arguments.concurrency:
                params = SamplingParams(
                    max_tokens=task.max_tokens, temperature=temperature, seed=1, ignore_eos=task.to_the_end
                )
                before = drafting.stats()
                speeds: dict[bool, list[float]] = {False: [], True: []}
                for run in range(arguments.runs + 1):
                    without, expected = tokens_per_second(plain, task.prompt, params, concurrency)
                    with_drafts, ids = tokens_per_second(drafting, task.prompt, params, concurrency)
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
                    f"{task.name:15}{temperature:6.1f}{concurrency:9}{off:9.1f}{on:9.1f}{on / off:9.2f}"
                    f"  {share}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
