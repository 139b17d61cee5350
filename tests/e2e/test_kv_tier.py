"""``swap_space`` and ``kv_tier_path`` from outside: room for more, and a warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, CacheConfig, SamplingParams
from headrace.errors import ConfigError
from headrace.frontend.outputs import RequestOutput
from tests import http
from tests.e2e.running import run, serving

BLOCK_BYTES = 368_640  # of SmolLM2: 16 tokens, in bfloat16
PARAMS = SamplingParams(max_tokens=40, temperature=0, logprobs=1, ignore_eos=True)
STORY = "The miller opened the headrace at dawn, and the wheel began to turn. " * 6
PROMPTS = [f"{number}. {STORY[: 200 + 40 * number]}" for number in range(8)]


def open_llm(blocks: int, **settings: Any) -> LLM:
    return LLM(
        "smollm2-135m",
        max_model_len=256,
        kv_cache_memory_bytes=blocks * BLOCK_BYTES,
        max_num_seqs=8,
        threads=1,
        **settings,
    )


def said(answers: list[RequestOutput]) -> list[Any]:
    return [answer.outputs[0] for answer in answers]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What everybody gets where there is room for all."""
    with open_llm(200) as llm:
        return said(llm.generate(PROMPTS, PARAMS))


def test_a_small_pool_with_swap_space(expected: list[Any]) -> None:
    """Eight long answers in blocks for one and a half: preempted, swapped, and the same to the last bit."""
    with open_llm(16, swap_space=0.1) as llm:
        assert said(llm.generate(PROMPTS, PARAMS)) == expected
        again = llm.generate(PROMPTS, PARAMS)
        assert said(again) == expected
        assert all(answer.num_cached_tokens > 16 for answer in again)
        stats = llm.stats()
    assert stats.num_tier_blocks == pytest.approx(0.1 * 2**30 / BLOCK_BYTES, rel=0.02)
    assert stats.tier_spills > 20
    assert stats.tier_hits > 20
    assert stats.tier_read_bytes == stats.tier_hits * BLOCK_BYTES


def test_the_next_process_starts_warm(tmp_path: Path, expected: list[Any]) -> None:
    """And a file that is damaged, or of another format, changes nothing but the time that it takes."""
    path = tmp_path / "blocks.tier"
    with open_llm(200, kv_tier_path=path, swap_space=0.1) as llm:
        assert llm.generate(PROMPTS, PARAMS)[0].num_cached_tokens == 0
    with open_llm(200, kv_tier_path=str(path), swap_space=0.1) as llm:
        answers = llm.generate(PROMPTS, PARAMS)
        assert said(answers) == expected
        assert all(answer.num_cached_tokens > 16 for answer in answers)
        assert llm.stats().tier_failures == 0

    sound = path.read_bytes()
    path.write_bytes(sound[:4096] + bytes(255 - byte for byte in sound[4096:]))
    with open_llm(200, kv_tier_path=path, swap_space=0.1) as llm:
        answers = llm.generate(PROMPTS[:2], PARAMS)
        assert said(answers) == expected[:2]
        assert answers[0].num_cached_tokens == 0

    path.write_bytes(sound)
    with open_llm(200, kv_tier_path=path, swap_space=0.1, kv_cache_dtype="int8") as llm:
        assert llm.stats().num_tier_blocks_used == 0
        assert llm.generate(PROMPTS[0], PARAMS)[0].num_cached_tokens == 0


def test_served_and_served_again(tmp_path: Path, expected: list[Any]) -> None:
    """The same question before and after a restart: the same answer, and most of its prompt is there."""
    body = {"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    options = ("--kv-tier-path", f"{tmp_path}/", "--swap-space", "0.2", "--max-model-len", "256")
    cached = []
    for extra in ((), ("--engine-process",)):
        with serving(*options, *extra) as server:
            answer = http.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == expected[0].text
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert server.metric("headrace_kv_tier_blocks_total") > 500
            hits = server.metric("headrace_kv_tier_hits_total")
            assert server.metric("vllm:prefix_cache_hits_total") == cached[-1] == 16 * hits
            assert server.stop() == 0
    assert cached[0] == 0
    assert cached[1] >= 32
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("Dear Ada,")
    for options, words in (
        (("--kv-tier-path", str(letter)), "is no KV tier"),
        (("--kv-tier-path", str(tmp_path), "--no-prefix-caching"), "leave prefix caching on"),
        (("--swap-space", "1e-9"), "one block of this model takes 368640 bytes"),
        (("--swap-space", "1e30"), "swap_space must be a number from 0 to 1048576"),
    ):
        ended = run("serve", "--port", "0", *options)
        assert ended.returncode != 0
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
    assert letter.read_text() == "Dear Ada,"


def test_in_a_cache_config(tmp_path: Path) -> None:
    config = CacheConfig(swap_space=0.05, kv_tier_path=str(tmp_path / "blocks"))
    with LLM("smollm2-135m", max_model_len=256, cache_config=config) as llm:
        assert llm.stats().num_tier_blocks > 100
    with pytest.raises(ConfigError, match="kv_tier_path must be the path of a file or folder, not 3"):
        LLM("smollm2-135m", cache_config=CacheConfig(kv_tier_path=3))  # type: ignore[arg-type]


def test_encoders_have_no_tier(tmp_path: Path) -> None:
    """vLLM's users pass swap_space to every model: it has no effect. A path would promise what cannot be."""
    with LLM("minilm-l6", swap_space=4) as llm:
        assert llm.stats().num_tier_blocks == 0
    with pytest.raises(ConfigError, match="Encoders keep no keys and values"):
        LLM("minilm-l6", kv_tier_path=tmp_path / "blocks")
