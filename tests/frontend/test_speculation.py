"""Speculation on the default model: other steps, the same answers, bit by bit.

On the best path of the CPU; the random schedules on tiny models go over all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.frontend.tokenizer_cache import convert_file
from tests.frontend.byte_model import TURN, byte_backend
from tests.frontend.random_model import random_model

TEXT = (
    "The brig Adelaide arrived from Lisbon with cork, salt and oranges; "
    "the schooner Wren came in from Bergen with dried cod and timber."
)
PROMPTS = [
    f"{TEXT}\n{TEXT}\nThe brig",
    "Once upon a time",
    f"def f(a, b):\n    return a\n# {TEXT}\n# The brig Ad",
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_answers(smollm2_path: Path, temperature: float) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=3, logprobs=2, ignore_eos=True, **more)
        for more in ({"n": 2}, {"repetition_penalty": 1.1}, {"prompt_logprobs": 1})
    ]
    answers = []
    for method in (None, {"method": "ngram"}, {"method": "draft_model", "model": "smollm2-135m"}):
        config = method and method | {"num_speculative_tokens": 6, "adaptive": False}
        with LLM(
            "smollm2-135m",
            max_model_len=256,
            threads=1,
            kv_cache_memory_bytes=32 * 2**20,
            speculative_config=config,
        ) as llm:
            together = llm.generate(PROMPTS, params, use_tqdm=False)
            alone = llm.generate(PROMPTS[:1], params[:1], use_tqdm=False)
            answers.append([(answer.outputs, answer.prompt_logprobs) for answer in [*together, *alone]])
            assert config is None or llm.stats().draft_tokens_accepted > 0
    assert answers[0] == answers[1] == answers[2]


def test_a_model_that_is_always_wrong(smollm2_path: Path, tmp_path: Path) -> None:
    """It has to find out, stop, and leave the answer alone."""
    files = convert_file(smollm2_path)
    config = {
        "method": "draft_model",
        "model": str(random_model(tmp_path / "random", 49152, files["tokenizer.json"])),
        "quantization": "int4",
        "kv_cache_memory_bytes": 2**20,
    }
    params = SamplingParams(max_tokens=160, temperature=0, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 256, "threads": 1, "kv_cache_memory_bytes": 32 * 2**20}
    with (
        LLM("smollm2-135m", **settings) as plain,
        LLM("smollm2-135m", speculative_config=config, **settings) as llm,
    ):
        [expected] = plain.generate(PROMPTS[1], params, use_tqdm=False)
        [answer] = llm.generate(PROMPTS[1], params, use_tqdm=False)
        stats = llm.stats()
    assert answer.outputs == expected.outputs
    assert stats.draft_tokens < 80  # some at first, and two at every 32nd token at most
    assert stats.num_steps <= 160


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    """A draft model of another vocabulary drafted nonsense in silence."""
    other = random_model(tmp_path / "bytes", 259, byte_backend().to_str().encode())
    with pytest.raises(
        ConfigError, match=r"another vocabulary: id \d+ is b'.*' in one and b'.*' in the other"
    ):
        LLM("smollm2-135m", speculative_config={"method": "draft_model", "model": str(other)})


def test_control_tokens_count(byte_tokenizer: Tokenizer) -> None:
    """Bytes that are equal may be text in one tokenizer and a command in the other."""
    backend = byte_backend()
    assert byte_tokenizer.difference(Tokenizer(backend)) is None  # what ends a turn is no matter
    plain = json.loads(backend.to_str())
    for token in plain["added_tokens"]:
        token["special"] = token["content"] != "<turn>"
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(plain)))
    assert byte_tokenizer.difference(other) == f"id {TURN} is a control token in one of them only"
    longer = byte_backend()
    longer.add_tokens(["<extra>"])
    assert "id 259 is b'' in one and b'<extra>'" in str(byte_tokenizer.difference(Tokenizer(longer)))


def test_bad_settings_are_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="has no 'tokens'"):
        LLM("smollm2-135m", speculative_config={"method": "ngram", "tokens": 3})
