"""A draft model: its own blocks follow every sequence wherever it goes, and it is silent where it loses."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engines import (
    VOCAB,
    Answers,
    Clock,
    DraftSizes,
    assert_idle,
    check_blocks,
    draft_model,
    finish,
    request,
    run,
    small_engine,
    tokens,
)
from test_build import WeightlessCheckpoint
from test_speculation import RepetitiveRunner, kinds, repetitive, without_speculation

from headrace.backend.batch import Batch, StepResult
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import Latency, SimulatedRunner
from headrace.engine import memory
from headrace.engine.build import SimulatedSpec, build_engine, check_scheduler_config
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from headrace.engine.draft_build import DraftPlan
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.engine.speculation import best_lengths
from headrace.engine.step_cost import StepCost
from headrace.errors import ConfigError, OutOfMemoryError

ALWAYS = SpeculativeConfig(method="draft_model", model="simulated", num_speculative_tokens=6, adaptive=False)
ADAPTIVE = replace(ALWAYS, adaptive=True)


class Counting(RepetitiveRunner):
    """A draft model of the target's kind that remembers what it was given to compute."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.steps: list[int] = []

    def run(self, batch: Batch) -> StepResult:
        self.steps.append(len(batch.token_ids))
        return super().run(batch)


def drafting(
    speculative: SpeculativeConfig = ALWAYS, *, draft: DraftSizes | None = None, **settings: Any
) -> Engine:
    return small_engine(
        runner=RepetitiveRunner,
        speculative=speculative,
        draft=draft or DraftSizes(runner=Counting),
        **settings,
    )


def computed(engine: Engine) -> list[int]:
    """Tokens of each step of the draft model, and none of earlier calls next time."""
    model = draft_model(engine)
    assert model is not None
    runner = model._runner
    assert isinstance(runner, Counting)
    steps, runner.steps = runner.steps, []
    return steps


def greedy(name: str, prompt: list[int], max_tokens: int = 60, **params: Any) -> Any:
    return request(name, prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [3, 40, 4096])
@pytest.mark.parametrize("config", [ALWAYS, ADAPTIVE], ids=["always", "adaptive"])
def test_the_same_answers(config: SpeculativeConfig, chunk: int, prefix_caching: bool) -> None:
    """A draft of rejected tokens stayed in the draft model's context, or one sequence got another's."""
    engine = drafting(config, max_num_batched_tokens=chunk, prefix_caching=prefix_caching)
    assert run(engine, kinds()).texts() == without_speculation(kinds())
    stats = engine.stats()
    if config is ALWAYS and chunk > 3:
        assert stats.draft_tokens_accepted > 100
        assert 0.2 < stats.draft_acceptance_rate < 0.99  # both ways were taken
        assert stats.draft_tokens_accepted == sum(stats.draft_tokens_accepted_per_position)
        assert stats.draft_seconds > 0


@pytest.mark.parametrize("draft", [256, 20, 6, 1])
@pytest.mark.parametrize("num_blocks", [8, 13, 31])
def test_the_same_answers_after_preemption(num_blocks: int, draft: int) -> None:
    """A preempted sequence kept its blocks in the draft model, or came back and found another's."""
    requests = [
        request(
            f"r{i}", repetitive(5 + 4 * i, i), max_tokens=70 - i, ignore_eos=True, n=1 + i % 2, logprobs=1
        )
        for i in range(8)
    ]
    engine = drafting(draft=DraftSizes(num_blocks=draft), num_blocks=num_blocks, max_model_len=128)
    assert run(engine, requests).texts() == without_speculation(requests)
    assert engine.stats().num_preemptions > 0
    assert draft < 20 or engine.stats().draft_tokens_accepted > 0


@pytest.mark.parametrize("draft_blocks", [256, 24])
@pytest.mark.parametrize("num_blocks", [256, 24])
def test_drafts_follow_from_the_tokens_and_from_nothing_else(
    num_blocks: int, draft_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V of a rejected draft, or of another sequence, led it astray: only speed showed that."""
    engine = drafting(
        draft=DraftSizes(num_blocks=draft_blocks),
        num_blocks=num_blocks,
        max_model_len=192,
        max_num_batched_tokens=60,
    )
    model = draft_model(engine)
    assert model is not None
    propose, made, rng = model.propose, [], random.Random(1)

    def recording(sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts = propose(sequences, [limit if rng.random() < 0.6 else 0 for limit in limits])
        known = [seq.tokens(0, seq.num_tokens).tolist() for seq in sequences]
        made.extend((each, draft) for each, draft in zip(known, drafts, strict=True) if draft)
        return drafts

    monkeypatch.setattr(model, "propose", recording)
    run(engine, kinds())
    assert len(made) > 100
    if num_blocks == 24:
        assert engine.stats().num_preemptions > 0
    some = made[:: len(made) // 100]
    oracle = small_engine(runner=RepetitiveRunner, prefix_caching=False, num_blocks=4000)
    answers = run(
        oracle, [greedy(f"{index}", known, len(draft)) for index, (known, draft) in enumerate(some)]
    )
    for index, (_, draft) in enumerate(some):
        assert answers[f"{index}", 0].token_ids == draft


def test_a_right_draft_is_computed_once() -> None:
    """Every accepted token was computed again by the draft model: half of its steps were for nothing."""
    engine = drafting()
    computed(engine)
    run(engine, [greedy("r", tokens(20, 1), 99)])
    stats = engine.stats()
    assert stats.draft_acceptance_rate == 1.0
    assert stats.num_steps == 1 + 98 // 7  # the prompt, then six drafted tokens and one more each
    assert sum(computed(engine)) <= 20 + 99


def test_a_wrong_draft_is_computed_anew() -> None:
    """Its K and V must not stand for those of the tokens that were sampled."""
    engine = drafting(draft=DraftSizes(runner=SimulatedRunner))
    each = greedy("r", tokens(20, 1), 99)
    assert run(engine, [each]).texts() == without_speculation([each])
    assert engine.stats().draft_acceptance_rate < 0.2


def test_the_next_turn_of_a_chat_begins_with_what_was_computed() -> None:
    """The target found the whole prompt in its cache; the draft model computed all of it again."""
    engine = drafting(max_model_len=400)
    first = run(engine, [greedy("first", tokens(150, 1))])
    assert max(computed(engine)) >= 64
    again = tokens(150, 1) + first["first", 0].token_ids + tokens(5, 2)
    run(engine, [greedy("again", again, 30)])
    assert engine.stats().prefix_cache_hits >= 192
    assert sum(computed(engine)) < 30 + 5 + 2 * 16
    engine.add(greedy("salted", again, 30, salt="another"))
    finish(engine, Answers())
    assert sum(computed(engine)) > 200  # another tenant's blocks are not for it


def test_the_target_may_know_what_the_draft_model_does_not() -> None:
    """The prompt came from the prefix cache and the draft model had nothing to go on."""
    engine = drafting()
    plain = request("plain", tokens(200, 1), max_tokens=1)  # ends before anything is drafted
    run(engine, [plain])
    computed(engine)
    each = greedy("r", tokens(200, 1), 40)
    assert run(engine, [each]).texts() == without_speculation([each])
    assert engine.stats().prefix_cache_hits >= 176
    assert sum(computed(engine)) >= 200
    assert engine.stats().draft_tokens_accepted > 20


def test_a_long_prompt_is_caught_up_with_in_small_steps() -> None:
    """Two thousand tokens went through the draft model between two tokens of everybody else."""
    clock, slow = Clock(), Latency(0.010, 0.001)
    engine = drafting(
        draft=DraftSizes(runner=Counting, latency=slow, max_model_len=2000),
        max_model_len=2000,
        clock=clock,
        latency=Latency(0.1, 0.001),
        max_num_batched_tokens=2000,
    )
    computed(engine)
    engine.add(greedy("long", tokens(1200, 1), 60))
    longest = 0.0
    generated = []
    while engine.has_work:
        start = clock.now
        outputs = engine.step()
        if generated:
            longest = max(longest, clock.now - start)
        generated += [len(output.token_ids) for output in outputs]
    steps = computed(engine)
    # As long as six steps of 11 ms each, for the six tokens that a draft has.
    assert 16 <= max(steps) <= 100
    assert longest <= 0.1 + 0.007 + 2 * 6 * 0.011 + 0.02
    assert generated[:10] == [1] * 10  # one at a time while it catches up, but one at every step
    assert engine.stats().draft_tokens_accepted > 20
    assert_idle(engine)


def test_a_context_longer_than_the_draft_models() -> None:
    """Behind its last position there are no drafts, and until then there are."""
    engine = drafting(draft=DraftSizes(max_model_len=64))
    each = greedy("r", tokens(40, 1), 100)
    assert run(engine, [each]).texts() == without_speculation([each])
    assert 18 <= engine.stats().draft_tokens_accepted <= 25
    longer = greedy("longer", tokens(70, 1), 50)
    before = engine.stats().draft_tokens
    assert run(engine, [longer]).texts() == without_speculation([longer])
    assert engine.stats().draft_tokens == before


def test_a_pool_for_one_of_three() -> None:
    """Those for whom there is no room get no drafts; the blocks of one that had drafts go to the next."""
    engine = drafting(draft=DraftSizes(num_blocks=7))
    requests = [greedy(f"r{i}", tokens(40, i), 50) for i in range(3)]
    assert run(engine, requests).texts() == without_speculation(requests)
    assert engine.stats().draft_tokens_accepted > 30
    model = draft_model(engine)
    assert model is not None and model.kv_cache.num_free == 7


@pytest.mark.parametrize("vocab_size", [VOCAB - 20, VOCAB + 20])
def test_ids_that_only_one_of_them_has(vocab_size: int) -> None:
    """The larger vocabulary is padded: its ids are none of the other's business."""
    engine = drafting(draft=DraftSizes(vocab_size=vocab_size))
    requests = [greedy("r", repetitive(30, 1)), *kinds()]
    assert run(engine, requests).texts() == without_speculation(requests)


def test_aborts_and_many_sequences_leave_nothing_behind() -> None:
    engine = drafting(max_num_seqs=3)
    for index in range(9):
        engine.add(greedy(f"r{index}", repetitive(20 + index, 1), n=2))
    for number in range(60):
        engine.step()
        check_blocks(engine)
        if number % 5 == 0:
            engine.abort(f"r{number // 5}", number % 2 or None)
    finish(engine, Answers())


# Where it pays


def seconds_of(
    speculative: SpeculativeConfig | None, *, draft: DraftSizes | None = None, sequences: int = 1
) -> float:
    """What answers of 300 tokens take on an engine whose steps read weights and little else."""
    clock = Clock()
    engine = small_engine(
        runner=RepetitiveRunner,
        clock=clock,
        latency=Latency(0.1, 0.002),
        speculative=speculative,
        draft=draft,
        max_model_len=400,
    )
    start = clock.now
    run(engine, [greedy(f"r{i}", tokens(32, i), 300) for i in range(sequences)])
    return clock.now - start


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_good_and_cheap_model_pays(sequences: int) -> None:
    fast = seconds_of(ADAPTIVE, draft=DraftSizes(latency=Latency(0.01, 0.0002)), sequences=sequences)
    # Eight share 32 rows: four drafted tokens each, at most.
    assert seconds_of(None, sequences=sequences) > (3 if sequences == 1 else 2.2) * fast


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize(
    "draft",
    [
        DraftSizes(runner=SimulatedRunner, latency=Latency(0.01, 0.0002)),  # cheap, and never right
        DraftSizes(runner=SimulatedRunner, latency=Latency(0.1, 0.002)),
        DraftSizes(latency=Latency(0.2, 0.002)),  # always right, and slower than the target
    ],
    ids=["wrong", "wrong and slow", "slow"],
)
def test_it_is_silent_where_it_loses(draft: DraftSizes, sequences: int) -> None:
    """A draft model that was never right cost two fifths of the speed for as long as the server ran."""
    slow = seconds_of(ADAPTIVE, draft=draft, sequences=sequences)
    assert seconds_of(None, sequences=sequences) > 0.9 * slow


def test_what_one_sequence_has_shown_the_next_need_not_learn() -> None:
    """Each of many short answers tried a useless draft model anew."""
    engine = small_engine(
        runner=RepetitiveRunner,
        clock=Clock(),
        latency=Latency(0.1, 0.002),
        speculative=ADAPTIVE,
        draft=DraftSizes(runner=SimulatedRunner, latency=Latency(0.01, 0.0002)),
    )
    run(engine, [greedy("first", tokens(32, 1), 40)])
    before = engine.stats().draft_tokens
    assert before > 0
    for index in range(20):
        run(engine, [greedy(f"r{index}", tokens(32, index), 10)])
    assert engine.stats().draft_tokens - before <= 2 * (200 // 32 + 1)


def test_a_long_prompt_is_not_computed_for_a_short_answer() -> None:
    """The draft model was still reading the prompt when the answer was over."""
    slow = DraftSizes(runner=Counting, latency=Latency(0.02, 0.002))
    engine = drafting(
        ADAPTIVE, draft=slow, clock=Clock(), latency=Latency(0.1, 0.002), max_num_batched_tokens=64
    )
    computed(engine)
    run(engine, [greedy("warms up", tokens(16, 2), 20)])
    computed(engine)
    run(engine, [greedy("short", tokens(300, 1), 4)])
    assert sum(computed(engine)) == 0
    run(engine, [greedy("long", tokens(300, 1), 90)])
    assert sum(computed(engine)) > 300


def test_lengths_count_what_drafting_costs() -> None:
    cost, cheap, dear = StepCost(), StepCost(), StepCost()
    for count in (1, 4, 9, 2, 16, 1):
        cost.note(count, 0.100 + 0.001 * count)
        cheap.note(count, 0.005 + 0.0001 * count)
        dear.note(count, 0.110 + 0.001 * count)

    def lengths(rates: list[float], draft_cost: StepCost | None) -> list[int]:
        return best_lengths([[rate] * 8 for rate in rates], cost, draft_cost)[0]

    assert lengths([0.98], cheap) == [8]
    assert lengths([0.98], dear) == [0]
    assert 0 < lengths([0.7], cheap)[0] < lengths([0.7], None)[0] <= 8
    assert lengths([0.05], cheap) == [0]
    assert lengths([0.9, 0.0, 0.0], cheap)[1:] == [0, 0]
    # One of many: what it may gain does not pay for a step of the draft model.
    assert lengths([0.9, *[0.0] * 40], cheap)[0] < lengths([0.9], cheap)[0]
    assert lengths([0.9] * 40, cheap)[0] > 0
    # Before the first step nothing is known to compare with; what is free is worth it all the same.
    assert best_lengths([[0.9] * 8], StepCost(), cheap) == ([0], 0.0)
    assert best_lengths([[0.9] * 8], StepCost())[0] > [0]


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "draft_model"}, "must name the model that drafts"),
        ({"method": "draft_model", "model": 3}, "must name the model that drafts"),
        (
            {"method": "draft_model", "model": "m", "prompt_lookup_max": 3},
            "no 'prompt_lookup_max' with method",
        ),
        ({"method": "ngram", "model": "m"}, "no 'model' with method 'ngram'"),
        ({"method": "draft_model", "model": "m", "quantization": "int3"}, "quantization"),
        ({"method": "draft_model", "model": "m", "kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"),
        ({"method": "draft_model", "model": "m", "num_speculative_tokens": 65}, "from 1 to 64"),
    ],
)
def test_bad_settings(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_scheduler_config(SchedulerConfig(speculative=SpeculativeConfig.of(settings)))


def test_an_engine_without_one() -> None:
    """It drafted by prompt lookup instead, and nobody was told."""
    spec = SimulatedSpec(num_blocks=8, max_model_len=64, scheduler=SchedulerConfig(speculative=ALWAYS))
    with pytest.raises(ConfigError, match="no draft model"):
        spec.build()


def test_its_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models were checked one by one, and did not fit together."""
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.truncate(200 * 2**20)
    checkpoint = WeightlessCheckpoint(tmp_path)
    settings = RunnerSettings(num_blocks=64, max_batch_tokens=64, max_sequences=4, max_model_len=64)
    monkeypatch.setattr(memory, "available_bytes", lambda: 500 * 2**20)
    memory.check_memory(checkpoint, ModelConfig(), settings)
    memory.check_memory(checkpoint, ModelConfig(), settings, DraftPlan(checkpoint, "int4", settings))
    with pytest.raises(OutOfMemoryError, match=r"for the draft model"):
        memory.check_memory(checkpoint, ModelConfig(), settings, DraftPlan(checkpoint, None, settings))


@pytest.mark.native
def test_an_encoder_cannot_draft(smollm2_path: Path, minilm_path: Path) -> None:
    for model, draft in ((smollm2_path, minilm_path), (minilm_path, smollm2_path)):
        config = SpeculativeConfig(method="draft_model", model=str(draft))
        with pytest.raises(ConfigError, match="Encoders neither draft"):
            build_engine(model, ModelConfig(), CacheConfig(), SchedulerConfig(speculative=config))


@pytest.mark.native
def test_a_pool_without_a_block(smollm2_path: Path) -> None:
    config = SpeculativeConfig(method="draft_model", model=str(smollm2_path), kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="speculative_config is 1000, but one block"):
        build_engine(smollm2_path, ModelConfig(), CacheConfig(), SchedulerConfig(speculative=config))
