"""This machine and our own engine: ceilings measured, a model's speed predicted from them, and checked."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import psutil

from headrace.backend.cpu.cores import usable_cores
from headrace.backend.cpu.limits import Limits, measure_limits
from headrace.backend.cpu.runner import chosen_isa
from headrace.errors import ConfigError
from headrace.frontend.llm import LLM, SamplingParams
from headrace.lab.plan.engine_model import EngineModel
from headrace.lab.plan.hardware import EngineFactors
from headrace.lab.plan.recorded_step import record_step
from headrace.lab.plan.serving import Steady, Workload, closed_loop
from headrace.lab.plan.source import Source

_ROUNDS = 4
_ROUND_SECONDS = 1.0
_QUIET_LOAD = 0.25  # of a core, that others may use while we measure
_SEQUENCES = 32  # that run at a time by the scheduler's default


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of our engine on this machine. Rates are of one sequence alone, ``steady`` of the workload's users."""

    threads: int
    load_average: float  # of the minute before
    limits: Limits
    weight_bytes: int
    kv_bytes: int
    available_bytes: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    steady: Steady

    @property
    def busy(self) -> bool:
        """Whether others were computing, so that neither limits nor measurements mean much."""
        return self.load_average > _QUIET_LOAD

    @property
    def fits(self) -> bool:
        """Whether weights and KV of the workload's users fit into the memory that is available now."""
        return self.weight_bytes + self.kv_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """The same two rates, measured: medians of ``runs`` after one that warmed up."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    runs: int


def predict_here(
    source: Source,
    work: Workload,
    factors: EngineFactors,
    *,
    quantization: Literal["int8", "int4"] | None = None,
    threads: int = 0,
    limits: Limits | None = None,
) -> Prediction:
    """Measure the machine's ceilings (a few seconds; or take ``limits``) and predict.

    Raises ConfigError for a network that the engine does not run.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    program = record_step(source, quantization)
    threads = threads or usable_cores()
    if limits is None:
        limits = ceilings(threads)
    model = EngineModel(program, limits, factors)
    context = work.prompt_tokens + work.output_tokens / 2
    users = min(work.concurrency or 1, _SEQUENCES)
    return Prediction(
        threads=threads,
        load_average=load,
        limits=limits,
        weight_bytes=model.weight_bytes,
        kv_bytes=source.network.kv_bytes(work.context) * round(users),
        available_bytes=int(psutil.virtual_memory().available),
        decode_tokens_per_s=1 / model.decode_step_s(1, context),
        prefill_tokens_per_s=work.prompt_tokens / model.prefill_s(work.prompt_tokens),
        steady=closed_loop(model, work, users),
    )


def ceilings(threads: int) -> Limits:
    """The best of four rounds of each limit: a ceiling is what is reached when nobody else takes part."""
    rounds = [measure_limits(threads, _ROUND_SECONDS, isa=chosen_isa()) for _ in range(_ROUNDS)]
    return dataclasses.replace(
        rounds[0],
        read_bytes_per_s={
            size: max(each.read_bytes_per_s[size] for each in rounds) for size in rounds[0].read_bytes_per_s
        },
        int8_macs_per_s=max(each.int8_macs_per_s for each in rounds),
        bf16_macs_per_s=max(each.bf16_macs_per_s for each in rounds),
        float32_macs_per_s=max(each.float32_macs_per_s for each in rounds),
    )


def measure_here(
    model: str,
    work: Workload,
    *,
    quantization: Literal["int8", "int4"] | None = None,
    threads: int = 0,
    runs: int = 3,
) -> Measured:
    """Run our engine in this process: one sequence, random token ids, greedy, nothing cached between runs."""
    if work.output_tokens < 2:
        raise ConfigError("--check measures decoding: --output-tokens must be at least 2.")
    with LLM(
        model,
        quantization=quantization,
        threads=threads,
        max_model_len=work.context,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=_pool_bytes(model, work),
    ) as llm:
        vocabulary = llm.frontend.client.architecture.vocab_size
        draw = random.Random(0)

        def seconds(output_tokens: int) -> float:
            prompt = {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(work.prompt_tokens)]}
            params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            return time.perf_counter() - start

        seconds(2)
        first = median(seconds(1) for _ in range(runs))
        whole = median(seconds(work.output_tokens) for _ in range(runs))
    decode = max(whole - first, 1e-9)
    return Measured((work.output_tokens - 1) / decode, work.prompt_tokens / first, runs)


def _pool_bytes(model: str, work: Workload) -> int:
    from headrace.lab.plan.source import find

    return 2 * find(model).network.kv_bytes(work.context + 32)
