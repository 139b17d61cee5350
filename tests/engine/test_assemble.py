"""Steps that are like the one before: the same batch again, and news only when there are any."""

from __future__ import annotations

from typing import Any

import pytest
from small_engines import VOCAB, Answers, assert_idle, finish, request, run, small_engine, tokens

from headrace.backend.batch import Batch, StepResult
from headrace.backend.simulated import SimulatedRunner
from headrace.engine.engine import Engine
from headrace.engine.request import EngineOutput, EngineRequest

ENDLESS: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}


class Keeping(SimulatedRunner):
    """Keeps every Batch object that it is given."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        return super().run(batch)


def made(engine: Engine) -> int:
    """How many batches were made, however often each went out."""
    assert isinstance(engine.runner, Keeping)
    return len({id(batch) for batch in engine.runner.batches})


def requests(count: int) -> list[EngineRequest]:
    """Prompts of several lengths: their sequences need blocks in different steps."""
    return [request(f"r{i}", tokens(3 + 5 * i, i), **ENDLESS) for i in range(count)]


def test_a_batch_goes_out_again_while_the_same_sequences_decode() -> None:
    """Every step made twenty arrays anew, out of cold caches, to say that each number was one more."""
    engine = small_engine(runner=Keeping)
    run(engine, requests(8))
    assert engine.stats().num_steps == 300
    assert made(engine) < 20  # one for each few blocks


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 26},  # not enough for all: they are preempted again and again
        {"windows": (None, 24), "num_blocks": 40},  # tables give blocks back, too
        {"prefix_caching": False, "max_num_batched_tokens": 9},
    ],
    ids=["preempted", "windows", "chunks"],
)
def test_what_changes_besides_the_numbers_is_made_anew(settings: dict[str, Any]) -> None:
    """A batch that went out again had the block tables of a sequence that had been preempted meanwhile."""
    brief = {"max_tokens": 150, "ignore_eos": True}
    asked = [
        *(request(f"r{i}", tokens(3 + 5 * i, i), **brief) for i in range(4)),
        request("penalised", tokens(9, 5), repetition_penalty=1.2, **brief),
        request("masked", tokens(9, 6), allowed_token_ids=list(range(0, VOCAB, 3)), **brief),
    ]
    alone: dict[tuple[str, int], Any] = {}
    for each in asked:
        alone.update(run(small_engine(windows=settings.get("windows", (None,))), [each]).texts())
    engine = small_engine(max_model_len=200, **settings)
    assert run(engine, asked).texts() == alone
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in settings)


def test_equal_text_that_two_have_computed_is_read_from_one_block() -> None:
    """The second to compute a block gives its own back: the batch must not go on reading that."""
    engine = small_engine(max_num_batched_tokens=200)
    same = [request(f"r{i}", tokens(20, 1), temperature=0.0, **ENDLESS) for i in range(2)]
    engine.add(same[0])
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step())
    engine.add(same[1])
    # Others come and take the blocks that were given back.
    for number in range(6):
        engine.add(request(f"other{number}", tokens(40, 9 + number), max_tokens=30, ignore_eos=True))
        answers.take(engine.step())
    finish(engine, answers)
    assert answers["r0", 0].token_ids == answers["r1", 0].token_ids


def gathered(engine: Engine, asked: EngineRequest) -> list[EngineOutput]:
    engine.add(asked)
    news = []
    while engine.has_work:
        news += engine.step()
    assert_idle(engine)
    return news


@pytest.mark.parametrize("gather", [1, 4, 100])
def test_tokens_that_may_wait_are_told_together(gather: int) -> None:
    """The first one and an end are told at once, and every token has its log-probabilities."""
    asked = request("r", tokens(9, 1), max_tokens=11, ignore_eos=True, logprobs=2)
    [whole] = run(small_engine(), [asked]).values()
    asked.gather = gather
    news = gathered(small_engine(), asked)
    sizes = {1: [1] * 11, 4: [1, 4, 4, 2], 100: [1, 10]}[gather]
    assert [len(output.token_ids) for output in news] == sizes
    assert [output.finish_reason for output in news] == [None] * (len(sizes) - 1) + ["length"]
    assert [token for output in news for token in output.token_ids] == whole.token_ids
    assert [entry for output in news for entry in output.logprobs or []] == whole.logprobs


def test_an_abort_tells_what_was_waiting() -> None:
    """Tokens that had been sampled, counted and charged for were never told."""
    engine = small_engine()
    asked = request("r", tokens(9, 1), **ENDLESS)
    asked.gather = 50
    engine.add(asked)
    news = [output for _ in range(7) for output in engine.step()]
    news += engine.abort("r")
    assert [len(output.token_ids) for output in news] == [1, 6]
    assert news[-1].finish_reason == "abort"
    assert engine.stats().generation_tokens == 7
