"""What a draft model is worth to its target on this machine's engine: acceptance, costs, tokens a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import HeadraceError
from headrace.frontend.llm import LLM, SamplingParams
from headrace.lab.compress.training.report import GOAL, Drafting
from headrace.model.store import Progress

MAX_PROMPTS = 12
LENGTH = 4
"""Tokens of a draft where acceptance is looked at."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a draft model, in steps of the target: of a token drafted, and of a step that verifies a draft."""

    drafted: float
    verifying: float

    def speedup(self, accepted_at: Sequence[float], times: float = 1.0) -> float:
        """Tokens a second over those without drafts, for the best length up to all of ``accepted_at``, if the
        target's steps took ``times`` as long. Source: Leviathan et al., 2023, with measured costs."""
        best, tokens = 1.0, 1.0
        for length, right in enumerate(accepted_at, 1):
            tokens += right
            best = max(best, tokens / (self.verifying + length * self.drafted / times))
        return best

    def pays_from(self, accepted_at: Sequence[float], goal: float) -> float | None:
        """How many times as long the target's steps must take for ``goal``; None: it is out of reach."""
        if self.speedup(accepted_at, 1e9) < goal:
            return None
        low, high = 0.0, 1e6
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(accepted_at, middle or 1e-9) >= goal else (middle, high)
        return high


def measure_drafting(
    target: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    *,
    quantization: Literal["int8", "int4"] | None,
    max_tokens: int,
    max_model_len: int,
    threads: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Drafting:
    """Answer each prompt greedily without drafts, with drafts as long as they pay, and with drafts of LENGTH.

    The engines are loaded together and take turns, so that a busy moment of the machine hits all; speeds are
    compared prompt by prompt. Raises HeadraceError if drafts changed an answer.
    """
    config: dict[str, Any] = {"method": "draft_model", "model": str(draft)}
    if quantization is not None:
        config["quantization"] = quantization
    common: dict[str, Any] = {
        "max_model_len": max_model_len,
        "threads": threads,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 128 * 2**20,
    }
    fixed = config | {"num_speculative_tokens": LENGTH, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
    times: dict[str, list[float]] = {"plain": [], "drafting": [], "fixed": []}
    tokens = 0
    with (
        LLM(str(target), **common) as plain,
        LLM(str(target), speculative_config=config, **common) as drafting,
        LLM(str(target), speculative_config=fixed, **common) as whole,
    ):
        engines = {"plain": plain, "drafting": drafting, "fixed": whole}
        for llm in engines.values():  # memory is touched for the first time
            llm.generate([list(prompts[0])], params, use_tqdm=False)
        before = whole.stats()
        for number, prompt in enumerate(prompts):
            progress("drafting", number, len(prompts))
            answers = {}
            for name, llm in engines.items():
                began = time.perf_counter()
                [answer] = llm.generate([list(prompt)], params, use_tqdm=False)
                times[name].append(time.perf_counter() - began)
                answers[name] = answer.outputs[0].token_ids
            if answers["plain"] != answers["drafting"] or answers["plain"] != answers["fixed"]:
                raise HeadraceError("Drafts changed an answer, which they never may: please report this.")
            tokens += len(answers["plain"])
        progress("drafting", len(prompts), len(prompts))
        after = whole.stats()
    drafted = [
        new - old
        for new, old in zip(
            after.draft_tokens_per_position, _padded(before.draft_tokens_per_position), strict=False
        )
    ]
    accepted = [
        new - old
        for new, old in zip(
            after.draft_tokens_accepted_per_position,
            _padded(before.draft_tokens_accepted_per_position),
            strict=False,
        )
    ]
    accepted_at = [right / all_ for right, all_ in zip(accepted, drafted, strict=False) if all_][:LENGTH]
    step = sum(times["plain"]) / max(tokens, 1)
    draft_s = after.draft_seconds - before.draft_seconds
    cycles = max(tokens - sum(accepted), 1)
    costs = Costs(
        drafted=draft_s / max(sum(drafted), 1) / step,
        verifying=(sum(times["fixed"]) - draft_s) / cycles / step,
    )
    ratios = [slow / fast for slow, fast in zip(times["plain"], times["drafting"], strict=True)]
    return Drafting(
        prompts=len(prompts),
        output_tokens=tokens,
        length=LENGTH,
        accepted_at=accepted_at,
        tokens_per_second=tokens / sum(times["drafting"]),
        plain_tokens_per_second=tokens / sum(times["plain"]),
        speedup=statistics.median(ratios),
        step_share=costs.drafted,
        verify_share=costs.verifying,
        pays_from=costs.pays_from(accepted_at, GOAL),
        quantization=quantization,
    )


def _padded(counts: Sequence[int]) -> list[int]:
    return [*counts, *([0] * LENGTH)]
