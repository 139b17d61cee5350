"""``--kv-cache-dtype`` from outside: served, chatted with, refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM, CacheConfig, SamplingParams
from headrace.errors import ConfigError
from tests import http
from tests.e2e.running import RunningServer, run, serving

ASK = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 1}


def test_served_in_int8(server: RunningServer) -> None:
    """The same words, from another fingerprint, and twice the blocks for the same memory."""
    wide = http.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()
    with serving("--kv-cache-dtype", "int8") as narrow:
        answer = http.post(f"{narrow.url}/v1/completions", json=ASK, timeout=60).json()
        blocks = narrow.metric("headrace_kv_blocks_total")
    assert answer["choices"][0]["text"].startswith(" Paris")
    assert answer["system_fingerprint"] != wide["system_fingerprint"]
    with serving("--kv-cache-dtype", "bfloat16") as plain:
        same = http.post(f"{plain.url}/v1/completions", json=ASK, timeout=60).json()
        assert blocks / plain.metric("headrace_kv_blocks_total") > 1.85
    assert (same["choices"], same["system_fingerprint"]) == (wide["choices"], wide["system_fingerprint"])


def test_chat_in_int8() -> None:
    options = ("--kv-cache-dtype", "int8", "--temperature", "0", "--max-tokens", "3", "--threads", "1")
    ended = run("chat", "--raw", *options, text=str(ASK["prompt"]))
    assert ended.returncode == 0
    assert "Paris" in ended.stdout


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_format_that_there_is_not(command: str) -> None:
    ended = run(command, "--kv-cache-dtype", "int4")
    assert ended.returncode != 0
    assert "int4" in ended.stderr
    assert "bfloat16" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_in_python() -> None:
    """As an argument, in vLLM's word, or in a CacheConfig; the same answer."""
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1)
    answers = []
    ways: list[dict[str, Any]] = [
        {"kv_cache_dtype": "int8"},
        {"cache_config": CacheConfig(kv_cache_dtype="int8")},
    ]
    for settings in ways:
        with LLM("smollm2-135m", threads=1, max_model_len=256, **settings) as llm:
            assert llm.cache_config.kv_cache_dtype == "int8"
            answers.append(llm.generate("The capital of France is", params)[0].outputs[0])
    assert answers[0].text == answers[1].text
    assert answers[0].text.startswith(" Paris")
    with pytest.raises(
        ConfigError, match="kv_cache_dtype must be one of 'auto', 'bfloat16', 'int8', not 'fp8'"
    ):
        LLM("smollm2-135m", kv_cache_dtype="fp8")
