"""The whole way on the default model: from a reference to text."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from headrace.errors import InvalidRequestError
from headrace.frontend.open import open_frontend

SMALL_POOL = 64 * 2**20
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(
        "smollm2-135m", threads=1, max_model_len=512, kv_cache_memory_bytes=SMALL_POOL, max_num_seqs=8
    ) as llm:
        yield llm


def test_the_capital_of_france(llm: LLM) -> None:
    [answer] = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].text == llm.frontend.tokenizer.decode(answer.outputs[0].token_ids)


def test_answers_do_not_depend_on_their_neighbours(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=5, logprobs=2, ignore_eos=True)
    prompts = [PROMPT, "Once upon a time", "def fib(n):", "2 + 2 ="]
    together = llm.generate(prompts, params)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = llm.generate(prompt, params)
        assert alone.outputs[0] == answer.outputs[0]


def test_a_stop_string_and_the_usage_it_leaves(llm: LLM) -> None:
    [free] = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    [cut] = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, stop=["ris"]))
    assert free.outputs[0].text.startswith(cut.outputs[0].text + "ris")
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", "ris")
    assert len(cut.outputs[0].token_ids) < 8


def test_chat_ends_its_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Reply with one word: what colour is the sky?"}]
    [answer] = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0))
    output = answer.outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason is None
    assert output.token_ids[-1] in llm.frontend.tokenizer.eos_token_ids
    assert output.text and "<|im_end|>" not in output.text


def test_an_engine_in_a_process_says_the_same(llm: LLM, smollm2_path: Path) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    frontend = open_frontend(
        ModelConfig("smollm2-135m", max_model_len=512, threads=1),
        CacheConfig(kv_cache_memory_bytes=SMALL_POOL),
        SchedulerConfig(),
        process=True,
    )

    async def read() -> tuple[str, list[int]]:
        text, ids = "", []
        ids_in = frontend.encode_prompt(PROMPT)
        async for outputs in frontend.stream(ids_in, SamplingParams(max_tokens=8, temperature=0)):
            text += outputs[0].text
            ids += outputs[0].token_ids
        return text, ids

    try:
        assert asyncio.run(read()) == (expected.text, expected.token_ids)
    finally:
        frontend.close()


def test_a_program_that_never_closes_its_llm_ends_cleanly(smollm2_path: Path) -> None:
    """The engine's thread used to survive until the interpreter was gone, and the bindings complained."""
    program = (
        "from headrace import LLM, SamplingParams; llm = LLM('smollm2-135m');"
        f"print(llm.generate([{PROMPT!r}], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text);"
        "llm.frontend.submit([1], SamplingParams(max_tokens=None, ignore_eos=True), lambda request: None)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "Paris" in run.stdout


def test_a_base_model_generates_but_does_not_chat(gemma3_path: Path) -> None:
    with LLM("gemma3-270m", threads=1, max_model_len=256, kv_cache_memory_bytes=SMALL_POOL) as llm:
        [answer] = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0))
        assert answer.prompt_token_ids[0] == llm.frontend.tokenizer.bos_token_id
        assert answer.outputs[0].text.startswith(" ")
        with pytest.raises(InvalidRequestError, match="base model"):
            llm.chat([{"role": "user", "content": "Hi"}])
