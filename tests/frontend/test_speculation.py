"""Prompt lookup on the default model: other steps, the same answers, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError

pytestmark = pytest.mark.native
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
    for config in (None, {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False}):
        with LLM(
            "smollm2-135m",
            max_model_len=256,
            kv_cache_memory_bytes=32 * 2**20,
            speculative_config=config,
        ) as llm:
            together = llm.generate(PROMPTS, params, use_tqdm=False)
            alone = llm.generate(PROMPTS[:1], params[:1], use_tqdm=False)
            answers.append([(answer.outputs, answer.prompt_logprobs) for answer in [*together, *alone]])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert stats.draft_tokens_accepted > 0


def test_bad_settings_are_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="has no 'tokens'"):
        LLM("smollm2-135m", speculative_config={"method": "ngram", "tokens": 3})
