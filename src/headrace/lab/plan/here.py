"""This machine and our own engine: ceilings measured, a model's speed predicted from them, and checked."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import time
from collections.abc import Sequence
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
from headrace.lab.plan.source import Source, find

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
    """The median of a few rounds of each limit, measured alone."""
    return _median([measure_limits(threads, _ROUND_SECONDS, isa=chosen_isa()) for _ in range(_ROUNDS)])


def _median(rounds: Sequence[Limits]) -> Limits:
    """Of each limit by itself. Neighbours of a virtual machine take bandwidth for seconds at a time: the best
    of all rounds is what a model will not see.
    """
    return dataclasses.replace(
        rounds[0],
        read_bytes_per_s={
            size: median(each.read_bytes_per_s[size] for each in rounds)
            for size in rounds[0].read_bytes_per_s
        },
        int8_macs_per_s=median(each.int8_macs_per_s for each in rounds),
        bf16_macs_per_s=median(each.bf16_macs_per_s for each in rounds),
        float32_macs_per_s=median(each.float32_macs_per_s for each in rounds),
        vector_int8_macs_per_s=median(each.vector_int8_macs_per_s for each in rounds),
    )


def check_here(
    model: str,
    work: Workload,
    factors: EngineFactors,
    *,
    quantization: Literal["int8", "int4"] | None = None,
    threads: int = 0,
    runs: int = 5,
) -> tuple[Prediction, Measured]:
    """Predict, and run our engine in this process: one sequence, random token ids, greedy, nothing cached.

    The limits are measured between the runs, one round before each, so that both see the same machine.
    Raises ConfigError if the workload has no decoding.
    """
    if work.output_tokens < 2:
        raise ConfigError("--check measures decoding: --output-tokens must be at least 2.")
    threads = threads or usable_cores()
    source = find(model)
    with LLM(
        model,
        quantization=quantization,
        threads=threads,
        max_model_len=work.context,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 * source.network.kv_bytes(work.context + 32),
    ) as llm:
        vocabulary = llm.frontend.client.architecture.vocab_size
        draw = random.Random(0)

        async def seconds() -> tuple[float, float]:
            """To the first token, and from there to the last."""
            prompt = [draw.randrange(vocabulary) for _ in range(work.prompt_tokens)]
            params = SamplingParams(temperature=0, max_tokens=work.output_tokens, ignore_eos=True)
            start = first = last = time.perf_counter()
            async for _ in llm.frontend.stream(prompt, params):
                last = time.perf_counter()
                if first == start:
                    first = last
            return first - start, last - first

        asyncio.run(seconds())
        limits, prefill, decode = [], [], []
        for _ in range(runs):
            limits.append(measure_limits(threads, _ROUND_SECONDS, isa=chosen_isa()))
            to_first, rest = asyncio.run(seconds())
            prefill.append(to_first)
            decode.append(rest)
    predicted = predict_here(
        source, work, factors, quantization=quantization, threads=threads, limits=_median(limits)
    )
    measured = Measured((work.output_tokens - 1) / median(decode), work.prompt_tokens / median(prefill), runs)
    return predicted, measured
