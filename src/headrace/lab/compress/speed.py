"""How fast a model runs on this machine's engine: loading, the first token, the next ones, many at a time."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from headrace.frontend.llm import LLM, SamplingParams
from headrace.lab.compress.peak import peak_memory

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 32
STREAMS = 8
_REPEATS = 3


class Speed(BaseModel):
    """Of prompts of PROMPT_TOKENS and answers of OUTPUT_TOKENS, the fastest of three runs each.

    ``tokens_per_second``: of STREAMS answers at a time, output tokens. ``load_s`` includes packing weights
    if that has not been done before. ``memory_bytes``: of a process that does nothing else, at its peak.
    """

    model_config = ConfigDict(extra="forbid")

    load_s: float
    ttft_ms: float
    tpot_ms: float
    tokens_per_second: float
    memory_bytes: int


def measure_speed(path: Path, *, threads: int = 0) -> Speed:
    """Load the model in a process of its own and run it, without a prefix cache. Raises what loading does."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, path, threads).result()


def _measure(path: Path, threads: int) -> Speed:
    began = time.monotonic()
    limit = PROMPT_TOKENS + OUTPUT_TOKENS + 1
    with LLM(str(path), max_model_len=limit, enable_prefix_caching=False, threads=threads) as llm:
        load_s = time.monotonic() - began
        vocabulary = llm.get_tokenizer().vocab_size
        prompts = [
            [(7919 * (at + 1) * (stream + 3)) % vocabulary for at in range(PROMPT_TOKENS)]
            for stream in range(STREAMS)
        ]
        first = _seconds(llm, prompts[:1], 1)
        whole = _seconds(llm, prompts[:1], OUTPUT_TOKENS)
        many = _seconds(llm, prompts, OUTPUT_TOKENS)
    return Speed(
        load_s=load_s,
        ttft_ms=1000 * first,
        tpot_ms=1000 * (whole - first) / (OUTPUT_TOKENS - 1),
        tokens_per_second=STREAMS * OUTPUT_TOKENS / many,
        memory_bytes=peak_memory(),
    )


def _seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    took = []
    for _ in range(_REPEATS):
        began = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        took.append(time.monotonic() - began)
    return min(took)
