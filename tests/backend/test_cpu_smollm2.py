"""Real models through the engine on native kernels: what they say, and that nothing else changes it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.backend.cpu.runner import chosen_isa
from headrace.backend.kv_format import KVCacheDtype
from headrace.engine.build import build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.memory import block_bytes
from headrace.engine.request import EngineRequest, SamplingParams
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model.weights import open_checkpoint
from tests.data.prompts import PROMPTS
from tests.engine.small_engines import run

pytestmark = pytest.mark.native


def engine(
    path: Path,
    *,
    num_blocks: int = 256,
    threads: int = 0,
    prefix: bool = False,
    kv: KVCacheDtype = "auto",
    **scheduler: int,
) -> Engine:
    size = num_blocks * block_bytes(open_checkpoint(path).architecture, kv)
    return build_engine(
        path,
        ModelConfig(max_model_len=256, threads=threads),
        CacheConfig(kv_cache_memory_bytes=size, enable_prefix_caching=prefix, kv_cache_dtype=kv),
        SchedulerConfig(**scheduler),
    )


def continuation(path: Path, prompt: str, count: int) -> str:
    tokenizer = load_tokenizer(path)
    params = SamplingParams(temperature=0, max_tokens=count)
    request = EngineRequest(request_id="r", prompt_token_ids=tokenizer.encode(prompt), params=params)
    runner = engine(path)
    try:
        return tokenizer.decode(run(runner, [request])["r", 0].token_ids)
    finally:
        runner.close()


def test_smollm2_knows_paris(smollm2_path: Path) -> None:
    assert continuation(smollm2_path, "The capital of France is", 4).startswith(" Paris")


def test_gemma3_knows_france(gemma3_path: Path) -> None:
    """A base model: it continues a pattern."""
    text = continuation(gemma3_path, "Berlin is the capital of Germany. Paris is the capital of", 3)
    assert text.startswith(" France")


@pytest.fixture(scope="module")
def company(smollm2_path: Path) -> list[EngineRequest]:
    """Seventeen requests of every kind: greedy and at temperature 1, penalties, logprobs, 1 … 24 tokens long.

    One of each kind on the portable path, which takes ten times as long.
    """
    tokenizer = load_tokenizer(smollm2_path)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.5, "logprobs": 1},
    ]
    requests = []
    for i in range(5 if chosen_isa() == "portable" else 17):
        tokens = tokenizer.encode(PROMPTS[11 * i] + " " + PROMPTS[i])[: (1, 9, 16, 17, 24)[i % 5]]
        params = SamplingParams(max_tokens=6 + i % 4, seed=i, ignore_eos=True, **kinds[i % 5])
        requests.append(EngineRequest(request_id=f"r{i}", prompt_token_ids=tokens, params=params))
    return requests


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, company: list[EngineRequest]) -> dict[tuple[str, int], Any]:
    """What each request gets with the engine to itself, on one thread."""
    made, texts = engine(smollm2_path, threads=1), {}
    for each in company:
        texts.update(run(made, [each]).texts())
    made.close()
    assert all(entry.logprob <= 0 for text in texts.values() for entry in text[1])
    assert all(len(text[0]) == len(text[1]) for text in texts.values())
    return texts


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_among_16_others_in_any_chunks(
    smollm2_path: Path, company: list[EngineRequest], alone: dict[tuple[str, int], Any], chunk: int
) -> None:
    """Token ids and logprobs, bit by bit."""
    requests = company if chunk > 1 else company[:6]  # a token a step takes its time
    made = engine(smollm2_path, threads=2, max_num_batched_tokens=chunk)
    texts = run(made, requests).texts()
    made.close()
    assert texts == {key: alone[key] for key in texts}
    assert len(texts) == len(requests)


def test_with_a_warm_prefix_cache(
    smollm2_path: Path, company: list[EngineRequest], alone: dict[tuple[str, int], Any]
) -> None:
    made = engine(smollm2_path, prefix=True)
    assert run(made, company).texts() == alone
    assert run(made, company).texts() == alone
    assert made.stats().prefix_cache_hits > 0
    made.close()


def test_after_preemption(smollm2_path: Path, company: list[EngineRequest]) -> None:
    """A pool of four blocks: sequences are thrown out, recomputed in other chunks, and go on as they were."""
    long = []
    for each in company[1:5]:
        each = copy.deepcopy(each)
        each.params.max_tokens = 20
        long.append(each)
    roomy, tight = engine(smollm2_path), engine(smollm2_path, num_blocks=4, max_num_batched_tokens=24)
    expected = {}
    for each in long:
        expected.update(run(roomy, [each]).texts())
    assert run(tight, long).texts() == expected
    assert tight.stats().num_preemptions > 0
    roomy.close()
    tight.close()


def test_with_keys_and_values_in_int8(smollm2_path: Path, company: list[EngineRequest]) -> None:
    """Alone, in small chunks among others, with a warm prefix cache, after preemption: every bit."""
    long = []
    for each in company[1:5]:
        each = copy.deepcopy(each)
        each.params.max_tokens = 20
        long.append(each)
    roomy, expected = engine(smollm2_path, kv="int8", threads=1), {}
    for each in long:
        expected.update(run(roomy, [each]).texts())
    roomy.close()
    chunked = engine(smollm2_path, kv="int8", threads=2, max_num_batched_tokens=7)
    assert run(chunked, long).texts() == expected
    chunked.close()
    warm = engine(smollm2_path, kv="int8", prefix=True)
    assert run(warm, long).texts() == expected
    assert run(warm, long).texts() == expected
    assert warm.stats().prefix_cache_hits > 0
    warm.close()
    tight = engine(smollm2_path, kv="int8", num_blocks=4, max_num_batched_tokens=24)
    assert run(tight, long).texts() == expected
    assert tight.stats().num_preemptions > 0
    tight.close()


@pytest.mark.skipif("HEADRACE_ISA" in os.environ, reason="each path is tested by itself")
def test_every_path_says_the_same_thing(
    smollm2_path: Path, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the same bits, but the same greedy text."""
    monkeypatch.setenv("HEADRACE_ISA", isa)
    text = continuation(smollm2_path, "The capital of France is", 12)
    monkeypatch.delenv("HEADRACE_ISA")
    assert text == continuation(smollm2_path, "The capital of France is", 12)
