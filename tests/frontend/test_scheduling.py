"""Priorities and timeouts in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace import SamplingParams
from headrace.engine.config import SchedulerConfig
from headrace.errors import InvalidRequestError
from headrace.frontend.batch import BatchError
from headrace.frontend.frontend import Frontend
from headrace.frontend.llm import LLM

ENDLESS = {"ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def llm(make_frontend: Callable[..., Frontend]) -> LLM:
    return LLM.from_frontend(make_frontend(step_s=0.005, max_num_seqs=1))


def test_the_most_urgent_prompt_is_answered_first(llm: LLM) -> None:
    """priority was vLLM's argument that did not exist."""
    params = SamplingParams(max_tokens=4, logprobs=0, **ENDLESS)  # type: ignore[arg-type]
    plain = llm.generate(["a", "b", "c"], params)
    ordered = llm.generate(["a", "b", "c"], params, priority=[3, 1, 2])
    assert [answer.outputs for answer in ordered] == [answer.outputs for answer in plain]
    numbers = [int(answer.request_id.rsplit("-", 1)[1]) for answer in ordered]
    assert sorted(range(3), key=numbers.__getitem__) == [1, 2, 0]


@pytest.mark.parametrize("priority", [[1], [1, 2.5], "ab", [1, 2**40]])
def test_bad_priorities(llm: LLM, priority: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="priority must be a list of 2 whole numbers"):
        llm.generate(["a", "b"], priority=priority)


def test_a_timeout_fails_one_answer_and_no_other(llm: LLM) -> None:
    late = SamplingParams(max_tokens=400, timeout_s=0.5, ignore_eos=True, stop=["never said"])
    with pytest.raises(BatchError, match=r"timeout_s = 0\.5") as caught:
        llm.generate(["a", "b"], [late, SamplingParams(max_tokens=4, ignore_eos=True)])
    failed, fine = caught.value.outputs
    assert failed.outputs[0].finish_reason == "error"
    assert 0 < len(failed.outputs[0].token_ids) < 200
    assert len(fine.outputs[0].token_ids) == 4
    assert llm.stats().deadlines_missed == 1


def test_settings_reach_the_scheduler() -> None:
    """An argument that is taken and forgotten is worse than one that does not exist."""
    config = SchedulerConfig(tpot_target_ms=40.0, priority_aging_s=3.0)
    sizes: dict[str, int] = {"threads": 1, "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    with LLM("smollm2-135m", scheduler_config=config, **sizes) as llm:
        assert llm.scheduler_config.tpot_target_ms == 40.0
    with LLM("smollm2-135m", tpot_target_ms=40.0, **sizes) as llm:
        [answer] = llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
        assert answer.outputs[0].token_ids
        assert llm.scheduler_config.tpot_target_ms == 40.0
