"""LLM: whole answers for batches of prompts."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from headrace.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
)
from headrace.frontend import batch
from headrace.frontend.frontend import Frontend
from tests.frontend.byte_model import EOS, TURN, VOCAB


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **changes})


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.frontend.tokenizer.encode("hello")
    forms: list[Any] = ["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}, ids, tuple(ids)]
    answers = llm.generate(forms, greedy())
    assert [answer.prompt for answer in answers] == ["hello", "hello", None, None, None]
    assert [answer.prompt_token_ids for answer in answers] == [ids] * 5
    assert len({answer.outputs[0].text for answer in answers}) == 1
    for form in forms:
        assert llm.generate(form, greedy())[0].outputs[0].text == answers[0].outputs[0].text
    assert all(answer.finished and answer.outputs[0].finish_reason == "length" for answer in answers)
    assert len({answer.request_id for answer in answers}) == 5


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(100)]
    params = [greedy(max_tokens=1 + i % 7) for i in range(100)]
    answers = llm.generate(prompts, params)
    assert [answer.prompt for answer in answers] == prompts
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [1 + i % 7 for i in range(100)]
    alone = llm.generate(prompts[42], params[42])[0]
    assert alone.outputs[0].token_ids == answers[42].outputs[0].token_ids


def test_more_prompts_than_the_queue_holds(make_frontend: Callable[..., Frontend]) -> None:
    """The engine refuses what its queue has no place for; an offline batch waits instead."""
    settings = {"max_num_seqs": 4, "max_waiting": 3}
    llm = LLM.from_frontend(make_frontend(**settings), SchedulerConfig(**settings))
    answers = llm.generate([f"{i}" for i in range(60)], greedy(n=2, temperature=1.0, seed=3))
    assert len(answers) == 60
    assert all(len(answer.outputs) == 2 for answer in answers)


def test_n_choices_and_default_params(llm: LLM) -> None:
    [answer] = llm.generate(["x"], SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True))
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({output.text for output in answer.outputs}) == 3
    [default] = llm.generate(["x"])
    assert 1 <= len(default.outputs[0].token_ids) <= 16


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_logprobs_in_vllms_shape(llm: LLM) -> None:
    [answer] = llm.generate("x", greedy(logprobs=3))
    output = answer.outputs[0]
    assert output.logprobs is not None and output.cumulative_logprob is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
        assert len(candidates) == 3
        assert candidates[token].rank == 1, "greedy takes the likeliest"
        assert sorted(c.rank or 0 for c in candidates.values()) == [1, 2, 3]
        byte = llm.frontend.tokenizer.token_bytes(token)
        assert candidates[token].decoded_token == byte.decode("utf-8", "replace")
    total = sum(c[t].logprob for t, c in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)
    [only] = llm.generate("x", greedy(logprobs=0))
    assert all(len(candidates) == 1 for candidates in only.outputs[0].logprobs or [])
    [none] = llm.generate("x", greedy())
    assert none.outputs[0].logprobs is None and none.outputs[0].cumulative_logprob is None


def test_chat_with_one_conversation_and_with_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(conversation, greedy())
    assert one.prompt == "<turn>user:hi<eos><turn>assistant:"
    assert one.prompt_token_ids[0] == TURN and EOS in one.prompt_token_ids
    many = llm.chat([conversation, conversation], greedy())
    assert [answer.outputs[0].text for answer in many] == [one.outputs[0].text] * 2
    [bare] = llm.chat(conversation, greedy(), add_generation_prompt=False)
    assert bare.prompt == "<turn>user:hi<eos>"


def test_stats_show_prefix_hits(llm: LLM) -> None:
    prompt = "a prefix that is much longer than one block of sixteen tokens " * 2
    first, second = (llm.generate(prompt, greedy())[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 96
    stats = llm.stats()
    assert 0 < stats.prefix_cache_hit_rate < 1
    assert stats.num_running_seqs == stats.num_waiting_seqs == 0


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (["good", ""], None, "prompt 1 of 2.*empty"),
        (["good", 5], None, "int"),
        (5, None, "not 5"),
        ("good", "greedy", "SamplingParams"),
        ([[]], None, "list"),
        ([[1, "a"]], None, "list"),
        ([1, VOCAB], None, "vocabulary"),
        (["good", 1], None, "int"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], None, "either"),
        ([{}], None, "either"),
        ([{"prompt_token_ids": [VOCAB]}], None, "vocabulary"),
        ([{"prompt_token_ids": "text"}], None, "str"),
        (["good", "bad"], [SamplingParams()], "2 prompts but 1"),
        (["good", "bad"], [SamplingParams(), SamplingParams(top_p=7.0)], "prompt 1 of 2.*top_p"),
        (["good", "x" * 600], None, "600 tokens"),
    ],
)
def test_one_wrong_prompt_and_nothing_runs(llm: LLM, prompts: Any, params: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, params)
    assert llm.stats().num_steps == 0


def test_an_over_long_prompt_names_both_counts(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"700 tokens.*512"):
        llm.generate("x" * 700)


def test_an_empty_conversation(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        llm.chat([])


def test_an_interrupt_frees_the_engine(
    make_frontend: Callable[..., Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = make_frontend(step_s=0.002)
    llm = LLM.from_frontend(frontend)
    submitted = 0
    submit = frontend.submit

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal submitted
        submitted += 1
        if submitted == 5:
            raise KeyboardInterrupt
        return submit(*args, **kwargs)

    monkeypatch.setattr(frontend, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 8, greedy(max_tokens=None))
    deadline = time.monotonic() + 60
    while llm.stats().num_running_seqs + llm.stats().num_waiting_seqs:
        assert time.monotonic() < deadline, "what was interrupted still runs"
        time.sleep(0.01)
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    assert llm.stats().generation_tokens < 1000


def test_closing(make_frontend: Callable[..., Frontend]) -> None:
    with LLM.from_frontend(make_frontend()) as llm:
        llm.generate("x", greedy())
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("x", greedy())


def test_an_engine_that_ends_under_way_leaves_nobody_waiting(make_frontend: Callable[..., Frontend]) -> None:
    llm = LLM.from_frontend(make_frontend(step_s=0.005))
    threading.Timer(0.05, llm.close).start()
    answers = llm.generate(["x", "y"], greedy(max_tokens=None))
    assert [answer.outputs[0].finish_reason for answer in answers] == ["abort", "abort"]


def test_progress_is_for_terminals_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["x"] * 3, greedy())
    assert capsys.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(batch.sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(["x"] * 3, greedy())
    shown = batch.sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "3/3" in shown and "tokens/s" in shown
    monkeypatch.setattr(batch.sys, "stderr", silent := Terminal())
    llm.generate(["x"] * 3, greedy(), use_tqdm=False)
    assert silent.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "a", "model_config": ModelConfig(model="b")}, "model is 'b' in ModelConfig, 'a'"),
        ({"cache_config": CacheConfig(enable_prefix_caching=False), "enable_prefix_caching": True}, "prefix"),
        ({"scheduler_config": SchedulerConfig(max_num_seqs=8), "max_num_seqs": 9}, "max_num_seqs"),
    ],
)
def test_settings_that_contradict_each_other(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**arguments)


def test_arguments_and_configs_add_up_and_configs_are_not_changed(tmp_path: Any) -> None:
    """Seen through the error for a model that is not there, which is the first thing looked for."""
    config = ModelConfig(max_model_len=100)
    before = dataclasses.asdict(config)
    with pytest.raises(ModelNotFoundError, match=r"missing\.gguf"):
        LLM(
            str(tmp_path / "missing.gguf"), model_config=config, max_model_len=100, enable_prefix_caching=True
        )
    assert dataclasses.asdict(config) == before


@pytest.mark.parametrize(
    "harmless",
    [
        {"tensor_parallel_size": 1, "dtype": "auto", "trust_remote_code": True, "enforce_eager": True},
        {
            "pipeline_parallel_size": 1,
            "tokenizer": None,
            "load_format": "auto",
            "enable_chunked_prefill": True,
        },
    ],
)
def test_what_vllm_scripts_pass_along_is_taken(tmp_path: Any, harmless: dict[str, Any]) -> None:
    """Seen through the error for a model that is not there, which comes after that for a wrong argument."""
    with pytest.raises(ModelNotFoundError):
        LLM(model=str(tmp_path / "missing.gguf"), max_model_len=64, **harmless)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported.*leave it at 1"),
        ({"dtype": "float16"}, "dtype='float16'.*quantization"),
        ({"revision": "main"}, "hf:org/name@revision"),
        ({"enable_chunked_prefill": False}, "always chunked"),
        ({"quantisation": "int8"}, "'quantisation'; did you mean quantization"),
        ({"tensor_parallel": 2}, "did you mean tensor_parallel_size"),
        ({"wibble": 1}, "no argument 'wibble'; there are .*max_model_len"),
    ],
)
def test_what_would_change_something_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LLM(**arguments)
    assert caught.value.param in arguments


def test_a_setting_without_effect_warns_what_has_one(tmp_path: Any) -> None:
    with (
        pytest.warns(UserWarning, match="gpu_memory_utilization has no effect: kv_cache_memory_bytes"),
        pytest.raises(ModelNotFoundError),
    ):
        LLM(str(tmp_path / "missing.gguf"), gpu_memory_utilization=0.9)


def test_sampling_params_as_vllm_takes_them(llm: LLM) -> None:
    nothing: Any = None
    [plain] = llm.generate("x", greedy(max_tokens=30))
    text = plain.outputs[0].text
    stop: Any = text[5:7]
    [stopped] = llm.generate(
        "x", greedy(max_tokens=30, stop=stop, stop_token_ids=nothing, logit_bias=nothing)
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    assert SamplingParams(stop=nothing).stop == []


def test_get_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    [answer] = llm.generate(tokenizer.encode("hello"), greedy())
    assert tokenizer.decode(answer.outputs[0].token_ids) == answer.outputs[0].text
