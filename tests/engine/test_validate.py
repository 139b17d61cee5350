"""Bad requests are refused with the field's name and what would be right; good ones pass."""

from __future__ import annotations

from typing import Any

import pytest
from small_engines import EOS, request, small_engine, tokens

from headrace.engine.request import EngineRequest, SamplingParams
from headrace.errors import InvalidRequestError

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.0, True, "2", None, 10**400],
    "temperature": [-0.1, NAN, INF, "1", None, True, 1e39, 10**400],
    "top_p": [0, -0.5, 1.01, NAN, "x"],
    "top_k": [-2, 1.5, True, None, 2**31],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [-2.1, 2.1, NAN, INF],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF],
    "repetition_penalty": [0, -1, NAN, INF, 1e-50],
    "seed": [-(2**63) - 1, 2**64, 1.5, True, "7"],
    "max_tokens": [0, -1, 1.5, True, "16"],
    "min_tokens": [-1, 17, True],
    "logprobs": [-1, 21, True, 1.0],
    "logit_bias": [
        {64: 1.0},
        {-1: 1.0},
        {"1": 1.0},
        {1: NAN},
        {1: INF},
        {1: 101},
        {1: "x"},
        {True: 1.0},
        [1],
    ],
    "stop_token_ids": [[64], [-1], ["1"], [True], [1.0], 3, [10**400]],
    "ignore_eos": [1, None, "yes"],
    "stop": ["", [""], [1], 1, {"a": 1}],
}
GOOD: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-30, 2.5, 3e38],
    "top_p": [1, 0.001],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 5],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 16, 10**6],
    "logprobs": [None, 0, 20],
    "logit_bias": [{}, {0: -100, 63: 100.0}],
    "stop_token_ids": [[], [0, 63]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    """Each of these reached a kernel, crashed the process boundary, or was silently something else."""
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value}).validate(64)
    assert caught.value.param == field
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in GOOD for value in GOOD[field]])
def test_good_values_run(field: str, value: Any) -> None:
    """The bounds themselves are allowed, and the engine serves them."""
    SamplingParams(**{field: value}).validate(64)
    engine = small_engine()
    prompt = tokens(4, 1)
    engine.add(request("r", prompt, **{"max_tokens": 1, field: value}))
    assert all(output.finish_reason != "error" for output in engine.step())


def test_without_a_vocabulary_ids_are_checked_for_sign_only() -> None:
    """LLM checks parameters before the model is open."""
    SamplingParams(stop_token_ids=[10**6]).validate()
    with pytest.raises(InvalidRequestError):
        SamplingParams(stop_token_ids=[-1]).validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", 7),
        ("cache_salt", None),
        ("priority", 1.5),
        ("priority", 2**40),
        ("arrival_time", NAN),
        ("eos_token_ids", [-1]),
        ("eos_token_ids", "7"),
        ("prompt_token_ids", []),
        ("prompt_token_ids", "text"),
        ("prompt_token_ids", [1, 64]),
        ("prompt_token_ids", [1, -1]),
        ("prompt_token_ids", [1, True]),
        ("prompt_token_ids", [1, 2.0]),
        ("prompt_token_ids", [1, 10**400]),
    ],
)
def test_bad_requests(field: str, value: Any) -> None:
    """An id outside of the vocabulary read beyond the embedding table."""
    fields: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1], "params": SamplingParams()}
    engine = small_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(EngineRequest(**{**fields, field: value}))
    assert caught.value.param == {"prompt_token_ids": "prompt"}.get(field, field)
    assert not engine.has_work


def test_an_eos_outside_of_the_vocabulary_is_harmless() -> None:
    """Some checkpoints name an EOS that their vocabulary does not have; banning it wrote out of bounds."""
    engine = small_engine()
    bad = EngineRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(min_tokens=3), eos_token_ids=[EOS, 10**6]
    )
    engine.add(bad)
    assert engine.step()[0].finish_reason is None
