"""The sampling parameters that users of vLLM expect beyond OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import InvalidRequestError
from headrace.frontend.frontend import Frontend
from tests.frontend.byte_model import EOS, TURN

IDS = {"prompt_token_ids": [10, 20, 30, 40, 50]}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 7, "ignore_eos": True, **changes})


def letters(llm: LLM, text: str) -> list[int]:
    return llm.frontend.encode_prompt(text)


def test_prompt_logprobs_are_those_of_the_same_tokens_when_sampled(llm: LLM) -> None:
    """A token's log-probability does not depend on whether it was given or made."""
    [made] = llm.generate(IDS, params(temperature=0.0, max_tokens=20, logprobs=2))
    answer = made.outputs[0]
    whole = {"prompt_token_ids": IDS["prompt_token_ids"] + answer.token_ids}
    [given] = llm.generate(whole, params(max_tokens=1, prompt_logprobs=2))
    assert given.prompt_logprobs is not None
    assert len(given.prompt_logprobs) == 25
    assert given.prompt_logprobs[0] is None
    assert given.prompt_logprobs[5:] == answer.logprobs
    assert made.prompt_logprobs is None


def test_prompt_logprobs_with_the_prompt_cached_and_in_pieces(make_frontend: Callable[..., Frontend]) -> None:
    """A prompt found in the prefix cache was not computed, and had no logits."""
    long = {"prompt_token_ids": [i * 7 % 200 for i in range(150)]}
    answers = []
    for chunk in (512, 37, 1):
        llm = LLM.from_frontend(make_frontend(max_num_batched_tokens=chunk))
        scored = params(n=2, prompt_logprobs=1)
        answers += [llm.generate(long, scored)[0].prompt_logprobs for _ in range(2)]
    assert answers[0] is not None
    assert all(answer == answers[0] for answer in answers)


def test_bad_words_are_never_spelled(llm: LLM) -> None:
    a, b = letters(llm, "ab")
    likely = params(logit_bias={a: 90.0, b: 90.0}, max_tokens=100)
    [free] = llm.generate(IDS, likely)
    assert "ab" in free.outputs[0].text
    likely.bad_words = ["ab", "bbb"]
    [kept] = llm.generate(IDS, likely)
    assert "ab" not in kept.outputs[0].text
    assert "bbb" not in kept.outputs[0].text


def test_bad_words_count_from_the_output_on(llm: LLM) -> None:
    """A prompt that ends in half a bad word bans nothing."""
    a, b = letters(llm, "ab")
    [answer] = llm.generate(
        {"prompt_token_ids": [a]},
        params(temperature=0.0, max_tokens=1, allowed_token_ids=[b], bad_words=["ab"]),
    )
    assert answer.outputs[0].text == "b"


def test_only_allowed_tokens(llm: LLM) -> None:
    allowed = letters(llm, "xyz")
    [answer] = llm.generate(IDS, params(allowed_token_ids=allowed))
    assert set(answer.outputs[0].token_ids) == set(allowed)


def test_special_tokens_in_the_text(llm: LLM) -> None:
    both = params(allowed_token_ids=[TURN, *letters(llm, "x")])
    [hidden] = llm.generate(IDS, both)
    both.skip_special_tokens = False
    [shown] = llm.generate(IDS, both)
    assert hidden.outputs[0].token_ids == shown.outputs[0].token_ids
    assert "<turn>" in shown.outputs[0].text
    assert shown.outputs[0].text.replace("<turn>", "") == hidden.outputs[0].text


def test_the_stop_string_in_the_text(llm: LLM) -> None:
    [free] = llm.generate(IDS, params(allowed_token_ids=letters(llm, "xyz")))
    stop = free.outputs[0].text[7:11]
    upto = free.outputs[0].text.index(stop)
    for include in (False, True):
        wanted = params(
            allowed_token_ids=letters(llm, "xyz"), stop=[stop], include_stop_str_in_output=include
        )
        [cut] = llm.generate(IDS, wanted)
        assert cut.outputs[0].text == free.outputs[0].text[: upto + 4 * include]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_the_stop_token_in_the_text(llm: LLM) -> None:
    [y] = letters(llm, "y")
    wanted = params(allowed_token_ids=letters(llm, "xy"), stop_token_ids=[y], include_stop_str_in_output=True)
    [answer] = llm.generate(IDS, wanted)
    assert answer.outputs[0].text == "x" * (len(answer.outputs[0].text) - 1) + "y"


def test_ids_without_text(llm: LLM) -> None:
    [text] = llm.generate(IDS, params())
    [ids] = llm.generate(IDS, params(detokenize=False))
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids
    assert (ids.outputs[0].text, ids.outputs[0].finish_reason) == ("", "length")


def test_a_prompt_cut_to_its_end(llm: LLM) -> None:
    [answer] = llm.generate(IDS, params(truncate_prompt_tokens=2))
    [same] = llm.generate({"prompt_token_ids": [40, 50]}, params())
    assert answer.prompt_token_ids == [40, 50]
    assert answer.outputs == same.outputs
    long = {"prompt_token_ids": [1] * 2000}
    [fits] = llm.generate(long, params(truncate_prompt_tokens=-1, max_tokens=12))
    assert len(fits.prompt_token_ids) == 512 - 12
    assert len(fits.outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 1000}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output"),
        ({"detokenize": False, "stop": ["x"]}, "stop"),
    ],
)
def test_bad_values(llm: LLM, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(IDS, params(**changes))
    assert caught.value.param == param


def test_eos_may_be_the_only_allowed_token(llm: LLM) -> None:
    [answer] = llm.generate(IDS, params(allowed_token_ids=[EOS], ignore_eos=False))
    assert (answer.outputs[0].token_ids, answer.outputs[0].finish_reason) == ([EOS], "stop")
