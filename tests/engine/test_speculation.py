"""Speculation changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from small_engines import VOCAB, Clock, request, run, small_engine, tokens

from headrace.backend.batch import Batch, Float32, StepResult
from headrace.backend.simulated import Latency, SimulatedRunner
from headrace.engine.build import check_scheduler_config
from headrace.engine.config import SchedulerConfig, SpeculativeConfig
from headrace.engine.request import EngineRequest
from headrace.engine.speculation import Acceptance, best_lengths
from headrace.engine.step_cost import StepCost
from headrace.errors import ConfigError

ALWAYS = SpeculativeConfig(num_speculative_tokens=6, prompt_lookup_min=2, adaptive=False)
PERIOD = 9


class RepetitiveRunner(SimulatedRunner):
    """Likes to say what it said 9 tokens ago, so that drafts are often right, and often enough wrong."""

    liking = 15.0

    def logits(self, batch: Batch) -> Float32:
        logits = super().logits(batch)
        owners = batch.query_start.searchsorted(batch.logit_rows, side="right") - 1
        earlier = batch.positions[batch.logit_rows] + 1 - PERIOD
        rows = np.flatnonzero(earlier >= 0)
        slots = self._slots(batch, 0)[owners[rows], earlier[rows]]
        logits[rows, self._slot_tokens[0][slots]] += np.float32(self.liking)
        return logits


def repetitive(count: int, seed: int) -> list[int]:
    return (tokens(PERIOD, seed) * (count // PERIOD + 1))[:count]


def kinds() -> list[EngineRequest]:
    """Requests of every kind that drafts could disturb."""
    return [
        request("greedy", repetitive(33, 1), temperature=0.0, max_tokens=60, ignore_eos=True),
        request("sampled", repetitive(40, 2), max_tokens=60, ignore_eos=True),
        request("logprobs", repetitive(32, 3), max_tokens=40, logprobs=3),
        request("cut", repetitive(20, 4), max_tokens=60, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
        request("three", repetitive(64, 5), max_tokens=33, n=3, logprobs=0),
        request("repeats", repetitive(40, 6), max_tokens=50, repetition_penalty=1.3, ignore_eos=True),
        request("counts", repetitive(40, 7), max_tokens=50, presence_penalty=0.3, frequency_penalty=0.2),
        request("biased", repetitive(17, 8), max_tokens=30, logit_bias={3: 4.0, 9: -100.0}),
        request("patient", repetitive(30, 9), max_tokens=40, min_tokens=25, stop_token_ids=tokens(9, 9)),
        request("stops", repetitive(30, 10), max_tokens=90, stop_token_ids=repetitive(6, 10)[5:]),
        request("chosen", repetitive(30, 11), max_tokens=40, allowed_token_ids=tokens(20, 11)),
        request("scored", repetitive(50, 12), max_tokens=30, prompt_logprobs=2, logprobs=1),
        request("one", repetitive(30, 13), max_tokens=1),
        request("two", repetitive(30, 13), max_tokens=2),
    ]


def without_speculation(requests: list[EngineRequest]) -> dict[tuple[str, int], Any]:
    texts: dict[tuple[str, int], Any] = {}
    for each in requests:
        key = msgspec.msgpack.encode(each)
        if key not in _plain:
            _plain[key] = run(small_engine(runner=RepetitiveRunner, prefix_caching=False), [each]).texts()
        texts.update(_plain[key])
    return texts


_plain: dict[bytes, Any] = {}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [3, 40, 4096])
@pytest.mark.parametrize("config", [ALWAYS, replace(ALWAYS, adaptive=True)], ids=["always", "adaptive"])
def test_the_same_answers(config: SpeculativeConfig, chunk: int, prefix_caching: bool) -> None:
    """A drafted row took the noise, penalties or bans of another position, or a wrong draft was kept."""
    engine = small_engine(
        runner=RepetitiveRunner,
        max_num_batched_tokens=chunk,
        prefix_caching=prefix_caching,
        speculative=config,
    )
    assert run(engine, kinds()).texts() == without_speculation(kinds())
    stats = engine.stats()
    if config is ALWAYS and chunk > 3:
        assert stats.draft_tokens_accepted > 100
        assert 0.2 < stats.draft_acceptance_rate < 0.99  # both ways were taken
        assert stats.draft_tokens_accepted == sum(stats.draft_tokens_accepted_per_position)
        assert stats.draft_tokens == sum(stats.draft_tokens_per_position)


@pytest.mark.parametrize("num_blocks", [8, 13, 31])
def test_the_same_answers_after_preemption(num_blocks: int) -> None:
    """A preempted sequence kept its draft as if it had been sampled."""
    requests = [
        request(
            f"r{i}", repetitive(5 + 4 * i, i), max_tokens=70 - i, ignore_eos=True, n=1 + i % 2, logprobs=1
        )
        for i in range(8)
    ]
    engine = small_engine(
        runner=RepetitiveRunner, num_blocks=num_blocks, max_model_len=128, speculative=ALWAYS
    )
    assert run(engine, requests).texts() == without_speculation(requests)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().draft_tokens_accepted > 0


def test_fewer_steps() -> None:
    """Accepted drafts that were computed again would have been worth nothing."""
    each = request("r", repetitive(36, 1), temperature=0.0, max_tokens=100, ignore_eos=True)
    steps = []
    for speculative in (None, ALWAYS):
        engine = small_engine(runner=RepetitiveRunner, speculative=speculative)
        run(engine, [each])
        steps.append(engine.stats().num_steps)
    assert steps[0] == 100
    assert steps[1] < 50


def test_the_end_of_the_context() -> None:
    """Drafts reached beyond max_model_len, or the answer ended before it."""
    each = request("r", repetitive(36, 1), temperature=0.0, max_tokens=None, ignore_eos=True)
    plain = run(small_engine(runner=RepetitiveRunner, max_model_len=100), [each])
    drafted = run(small_engine(runner=RepetitiveRunner, max_model_len=100, speculative=ALWAYS), [each])
    assert drafted.texts() == plain.texts()
    assert len(drafted["r", 0].token_ids) == 64


def test_blocks_of_rejected_drafts_are_not_findable() -> None:
    """A block with rejected tokens under the hash of accepted ones gave a later request a wrong context."""
    engine = small_engine(runner=RepetitiveRunner, speculative=ALWAYS)
    first = run(engine, [request("r", repetitive(40, 2), max_tokens=60, ignore_eos=True)])
    prompt = repetitive(40, 2) + first["r", 0].token_ids
    again = request("again", prompt, max_tokens=30, logprobs=1)
    assert run(engine, [again]).texts() == without_speculation([again])
    assert engine.stats().prefix_cache_hits >= 80  # the generated tokens, too


class BreaksAt(RepetitiveRunner):
    """Its logits after position 50 are broken."""

    def run(self, batch: Batch) -> StepResult:
        result = super().run(batch)
        result.failed |= batch.positions[batch.logit_rows] >= 50
        return result


def test_a_failure_behind_a_draft_comes_when_it_is_reached() -> None:
    """The tokens before it count; that of a rejected draft is no failure."""
    each = request("r", repetitive(36, 1), temperature=0.0, max_tokens=100, ignore_eos=True)
    answers = [
        run(small_engine(runner=BreaksAt, speculative=speculative), [each])["r", 0]
        for speculative in (None, ALWAYS)
    ]
    assert answers[0].text() == answers[1].text()
    assert len(answers[1].token_ids) == 15
    assert answers[1].finish_reason == "error"


# How long drafts are


class Random(SimulatedRunner):
    """What it says never repeats what it said."""


def test_drafting_stops_where_it_loses() -> None:
    """Every repeated pair of tokens cost a step of eight rows for nothing."""
    config = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_min=1)
    engine = small_engine(
        runner=Random, max_model_len=2000, speculative=config, clock=Clock(), latency=Latency(0.004, 0.0006)
    )
    run(engine, [request("r", tokens(200, 1), max_tokens=900, ignore_eos=True)])
    stats = engine.stats()
    assert 0 < stats.draft_tokens < 100
    assert stats.num_steps > 870


class Copying(SimulatedRunner):
    """Says its prompt again and again."""

    length = 300

    def logits(self, batch: Batch) -> Float32:
        logits = np.full((len(batch.logit_rows), VOCAB), -9.0, np.float32)
        owners = batch.query_start.searchsorted(batch.logit_rows, side="right") - 1
        at = (batch.positions[batch.logit_rows] + 1) % self.length
        slots = self._slots(batch, 0)[owners, at]
        logits[np.arange(len(at)), self._slot_tokens[0][slots]] = 9.0
        return logits


def test_a_copy_soon_gets_the_longest_drafts() -> None:
    """Lengths crept up by the step: a copy of a page was half over before drafts were long."""
    config = SpeculativeConfig(num_speculative_tokens=16)
    engine = small_engine(
        runner=Copying, max_model_len=700, speculative=config, clock=Clock(), latency=Latency(0.004, 0.0006)
    )
    engine.add(request("r", tokens(300, 3), temperature=0.0, max_tokens=300, ignore_eos=True))
    drafted = [0]
    while engine.has_work:
        engine.step()
        drafted.append(engine.stats().draft_tokens)
    lengths = np.diff(drafted).tolist()
    assert 16 in lengths[:8], lengths
    long = lengths[lengths.index(16) : -2]
    assert sum(long) / len(long) > 15, lengths
    assert engine.stats().num_steps < 30
    assert engine.stats().draft_acceptance_rate > 0.9


def test_a_silent_sequence_begins_to_draft_when_it_copies() -> None:
    """What had not paid for long was tried again with two tokens at every 32nd chance."""

    class Later(Copying):
        """Talks at random for a while, then copies."""

        def logits(self, batch: Batch) -> Float32:
            late = batch.positions[batch.logit_rows] + 1 >= 600
            return np.where(late[:, None], super().logits(batch), SimulatedRunner.logits(self, batch))

    config = SpeculativeConfig(num_speculative_tokens=16)
    engine = small_engine(
        runner=Later, max_model_len=900, speculative=config, clock=Clock(), latency=Latency(0.004, 0.0006)
    )
    engine.add(request("r", tokens(300, 3), temperature=0.0, max_tokens=500, ignore_eos=True))
    generated, longest = 0, 0
    before = 0
    while engine.has_work:
        generated += sum(len(output.token_ids) for output in engine.step())
        now = engine.stats().draft_tokens
        if 300 < generated < 340:
            longest = max(longest, now - before)
        before = now
    assert longest == 16


def test_the_cost_of_sizes_is_kept_apart() -> None:
    """After a long run of drafts of one length the cost of a step without one was forgotten."""
    cost = StepCost()
    for _ in range(10):
        cost.note(1, 0.004)
    for _ in range(100):
        cost.note(17, 0.014)
    assert cost.seconds(1) == pytest.approx(0.004, rel=0.1)
    assert cost.seconds(17) == pytest.approx(0.014, rel=0.1)
    assert 0.004 < cost.seconds(9) < 0.014


def test_the_length_follows_acceptance_and_load() -> None:
    cost = StepCost()
    for tokens_in_step in (1, 4, 9, 2, 16, 1):
        cost.note(tokens_in_step, 0.010 + 0.001 * tokens_in_step)
    sure, doubtful = Acceptance(100, 98), Acceptance(100, 50)

    def length(acceptance: Acceptance, sequences: int, draft_cost: StepCost | None = None) -> int:
        chances: list[list[float]] = [[acceptance.rate] * 16] + [[] for _ in range(sequences - 1)]
        lengths, saved_s = best_lengths(chances, cost, draft_cost)
        assert (saved_s > 0) == (lengths[0] > 0)
        return lengths[0]

    assert length(sure, 1) == 16
    assert 0 < length(doubtful, 1) < 6
    assert length(Acceptance(100, 5), 1) == 0
    assert length(doubtful, 64) == 0  # a full batch pays for every row
    assert length(sure, 16) > 0


def test_the_cost_of_a_token_is_learnt() -> None:
    """Steps of one size only say nothing about it; one slow step must not say everything."""
    cost = StepCost()
    for _ in range(50):
        cost.note(1, 0.010)
    base, token = cost.line(1)
    assert base == pytest.approx(0.010)
    assert 0 < token < base
    rng = np.random.default_rng(0)
    for count in rng.integers(1, 12, 200).tolist():
        cost.note(count, 0.010 + 0.0005 * count)
    cost.note(5, 10.0)
    for count in rng.integers(1, 12, 100).tolist():
        cost.note(count, 0.010 + 0.0005 * count)
    base, token = cost.line(4)
    assert base == pytest.approx(0.012, rel=0.2)
    assert token == pytest.approx(0.0005, rel=0.5)


# Settings


def test_settings_as_users_write_them() -> None:
    assert SpeculativeConfig.of(None) is None
    config = SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2})
    assert config == SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=2, prompt_lookup_min=2)
    check_scheduler_config(SchedulerConfig(speculative=config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_speculative_tokens": 3}, "method"),
        ("ngram", "method"),
        ({"method": "ngram", "tokens": 3}, "num_speculative_tokens"),
        ({"method": "eagle"}, "'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "must not be above"),
        ({"method": "ngram", "prompt_lookup_max": 10**9}, "from 1 to 64"),
        ({"method": "ngram", "adaptive": "yes"}, "adaptive"),
    ],
)
def test_bad_settings(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_scheduler_config(SchedulerConfig(speculative=SpeculativeConfig.of(settings)))
