"""The second tier: what is evicted comes back, and nobody's answer tells whether it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_engines import Answers, Clock, TierSizes, assert_idle, request, run, small_engine, tokens

from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import Runner
from headrace.backend.simulated import Latency
from headrace.engine import kv_cache, kv_tier
from headrace.engine.build import build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.kv_tier import KVTier
from headrace.engine.kv_tier_store import Job, MemoryStore, Parts, TierBlock
from headrace.engine.memory import block_bytes
from headrace.engine.request import EngineRequest
from headrace.errors import HeadraceError
from headrace.model.weights import open_checkpoint

LARGE = TierSizes(1000)


def tiered(**settings: Any) -> Engine:
    """An engine with a second tier, on a clock on which nothing takes time: everything pays."""
    return small_engine(**{"clock": Clock(), "tier": LARGE} | settings)


def cached(answers: Answers, name: str) -> int:
    """Prompt tokens of a request that were not computed."""
    last = answers[name, 0].last
    assert last is not None
    return last.num_cached_tokens


def long_requests(count: int) -> list[EngineRequest]:
    """So many that want much of a small pool."""
    return [
        request(f"r{i}", tokens(30 + i, i), max_tokens=70, ignore_eos=True, logprobs=1) for i in range(count)
    ]


# Hits


def test_what_was_evicted_comes_back() -> None:
    """A system prompt that had to give way to one long chat was computed again from its first token."""
    engine = tiered(num_blocks=12, max_model_len=190)
    prompt = tokens(100, 1)
    cold = run(engine, [request("r", prompt, max_tokens=9)])
    run(engine, [request("other", tokens(170, 2), max_tokens=9, ignore_eos=True)])
    computed = engine.stats().batch_tokens
    warm = run(engine, [request("r", prompt, max_tokens=9)])
    assert warm.texts() == cold.texts()
    assert cached(warm, "r") == 96
    stats = engine.stats()
    assert stats.tier_hits == 6
    assert stats.prefix_cache_hits == 96
    assert stats.batch_tokens - computed <= 4 + 9
    assert stats.tier_read_bytes == 6 * 128
    assert stats.tier_written_bytes == 128 * stats.tier_spills


def test_a_prefix_begins_in_one_tier_and_ends_in_the_other() -> None:
    """Leaves are evicted first: what follows the blocks that are still cached was not looked for."""
    engine = tiered(num_blocks=12, max_model_len=190)
    prompt = tokens(161, 1)
    run(engine, [request("r", prompt, max_tokens=1)])
    run(engine, [request("other", tokens(90, 2), max_tokens=1)])  # six blocks: two were free
    warm = run(engine, [request("r", prompt, max_tokens=1)])
    assert cached(warm, "r") == 160
    assert engine.stats().tier_hits == 4


def test_salts_do_not_share() -> None:
    """One tenant's text must not be read from what another's left."""
    engine = tiered(num_blocks=12, max_model_len=190)
    prompt = tokens(100, 1)
    run(engine, [request("r", prompt, max_tokens=1, salt="a")])
    run(engine, [request("other", tokens(170, 2), max_tokens=1)])
    assert cached(run(engine, [request("b", prompt, max_tokens=1, salt="b")]), "b") == 0
    assert cached(run(engine, [request("a", prompt, max_tokens=1, salt="a")]), "a") == 96


def test_equal_hashes_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit by hash alone would have continued one client's text from another's."""
    requests = [request(f"r{i}", tokens(50, i), max_tokens=40, ignore_eos=True) for i in range(6)]
    expected = run(small_engine(), requests).texts()
    monkeypatch.setattr(kv_cache, "block_key", lambda parent, tokens: b"the same for all")
    engine = tiered(num_blocks=6, max_model_len=96)
    assert run(engine, requests).texts() == expected
    assert run(engine, requests).texts() == expected
    assert engine.stats().tier_spills > 0


def test_the_tier_is_bounded_and_keeps_what_was_used_last() -> None:
    engine = tiered(num_blocks=12, max_model_len=190, tier=TierSizes(12))
    for number in range(6):
        run(engine, [request(f"r{number}", tokens(161, number), max_tokens=1)])
    stats = engine.stats()
    assert (stats.num_tier_blocks, stats.num_tier_blocks_used) == (12, 12)
    assert cached(run(engine, [request("old", tokens(161, 1), max_tokens=1)]), "old") == 0
    assert cached(run(engine, [request("new", tokens(161, 4), max_tokens=1)]), "new") > 0


def test_layers_with_a_window_find_what_they_will_see() -> None:
    """A window's group drops blocks that the others keep, and a prefix without its end is of no use."""
    engine = tiered(
        windows=(None, 64), num_blocks=600, window_blocks=63, max_model_len=1000, tier=TierSizes(2000)
    )
    text = tokens(640, 1)
    plain = small_engine(windows=(None, 64), num_blocks=600, max_model_len=1000)
    expected = run(plain, [request("again", text[:150], max_tokens=20, ignore_eos=True)]).texts()
    run(engine, [request("first", text, max_tokens=1)])
    run(engine, [request("other", tokens(570, 2), max_tokens=1)])  # takes the oldest of the window's blocks
    answers = run(engine, [request("again", text[:150], max_tokens=20, ignore_eos=True)])
    assert answers.texts() == expected
    assert cached(answers, "again") == 144  # none without the tier: see test_windows.py
    assert engine.stats().tier_hits == 9


# Preemption


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_20_long_requests_on_a_pool_for_two(prefix_caching: bool) -> None:
    """Each came back again and again, and computed its whole text anew every time."""
    expected = run(small_engine(num_blocks=400), long_requests(20)).texts()
    computed = {}
    for name, tier in (("recomputed", None), ("swapped", LARGE)):
        engine = tiered(
            num_blocks=14, max_model_len=128, prefix_caching=prefix_caching, tier=tier, max_num_seqs=8
        )
        assert run(engine, long_requests(20)).texts() == expected
        stats = engine.stats()
        assert stats.num_preemptions > 5
        assert (stats.preemptions_swapped > 5) == (tier is not None)
        assert (stats.prefix_cache_hits == 0) or prefix_caching
        computed[name] = stats.batch_tokens
    assert computed["swapped"] < computed["recomputed"]


def test_without_prefix_caching_nobody_finds_another_s_text() -> None:
    """The blocks of preempted sequences are theirs, even though they are found by content."""
    engine = tiered(num_blocks=14, max_model_len=128, prefix_caching=False)
    run(engine, long_requests(8))
    assert engine.stats().preemptions_swapped > 0
    again = run(engine, [request("again", tokens(31, 1), max_tokens=1)])
    assert cached(again, "again") == 0


class Slow(MemoryStore):
    """Takes time, of a clock of ours, for every block that it reads."""

    clock: Clock
    seconds = 0.0

    def read(self, block: TierBlock, groups: frozenset[int]) -> Parts | None:
        self.clock.sleep(self.seconds)
        return super().read(block, groups)


@pytest.mark.parametrize(("seconds", "pays"), [(0.001, True), (9.0, False)])
def test_the_cheaper_way_is_taken(seconds: float, pays: bool) -> None:
    """A block of sixteen tokens takes 0.16 s to compute here: reading it for nine seconds is no help."""
    clock = Clock()

    def tier(runner: Runner) -> KVTier:
        store = Slow(1000, runner.block_bytes)
        store.clock, store.seconds = clock, seconds
        return KVTier(runner, store, clock=clock)

    engine = tiered(
        num_blocks=14,
        max_model_len=128,
        clock=clock,
        latency=Latency(0.1, 0.01),
        max_num_seqs=8,
        max_queue_time_s=1e9,
        tier=tier,
    )
    expected = run(small_engine(num_blocks=400), long_requests(20)).texts()
    assert run(engine, long_requests(20)).texts() == expected
    stats = engine.stats()
    assert stats.preemptions_swapped + stats.preemptions_recomputed > 5
    assert (stats.preemptions_swapped > stats.preemptions_recomputed) == pays
    assert stats.tier_hits > 0  # it was tried


# Waiting for a disk


class Manual:
    """A worker that does its jobs when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, job: Job, *, urgent: bool) -> None:
        self.jobs.append(job)

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()

    def wait(self, timeout_s: float) -> None:
        """The test decides when."""

    def close(self) -> None:
        self.work()


def with_evicted(prompt: list[int]) -> tuple[Engine, Manual]:
    """An engine that has ``prompt`` in a tier which answers when it is told to."""
    worker = Manual()
    engine = tiered(
        num_blocks=24,
        max_model_len=300,
        tier=lambda runner: KVTier(runner, MemoryStore(1000, runner.block_bytes), worker, clock=Clock()),
    )
    run(engine, [request("first", prompt, max_tokens=1)])
    run(engine, [request("other", tokens(290, 2), max_tokens=9, ignore_eos=True)])
    worker.work()
    return engine, worker


def test_who_waits_for_a_disk_holds_up_nobody() -> None:
    """A step that waited for a block to be read kept every stream waiting with it."""
    prompt = tokens(100, 1)
    engine, worker = with_evicted(prompt)
    answers = Answers()
    engine.add(request("hit", prompt, max_tokens=5, ignore_eos=True))
    engine.add(request("same", prompt, max_tokens=5, ignore_eos=True))
    engine.add(request("cold", tokens(20, 5), max_tokens=20, ignore_eos=True))
    for _ in range(10):
        answers.take(engine.step())
        engine.kv_cache.check()
    assert len(answers["cold", 0].token_ids) == 10
    assert ("hit", 0) not in answers
    while engine.has_work:
        worker.work()
        answers.take(engine.step())
        engine.kv_cache.check()
    assert_idle(engine)
    assert cached(answers, "hit") == cached(answers, "same") == 96
    alone = run(small_engine(), [request("hit", prompt, max_tokens=5, ignore_eos=True)])
    assert answers["hit", 0].text() == alone["hit", 0].text()


def test_an_abort_while_blocks_are_read() -> None:
    """The blocks that came for it were put into blocks that were another's by then."""
    prompt = tokens(100, 1)
    engine, worker = with_evicted(prompt)
    engine.add(request("hit", prompt, max_tokens=5))
    engine.step()
    assert engine.stats().num_running_seqs == 1
    ended = engine.abort("hit")
    assert [output.finish_reason for output in ended] == ["abort"]
    engine.kv_cache.check()
    worker.work()
    answers = Answers()
    engine.add(request("again", prompt, max_tokens=5))
    while engine.has_work:
        worker.work()
        answers.take(engine.step())
        engine.kv_cache.check()
    assert_idle(engine)
    assert cached(answers, "again") == 96


def test_more_than_the_store_takes_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that waited to be written filled the memory of a machine with a slow disk."""
    monkeypatch.setattr(kv_tier, "_MOST_BYTES", 3 * 128)
    worker = Manual()
    engine = tiered(
        num_blocks=12,
        max_model_len=190,
        tier=lambda runner: KVTier(runner, MemoryStore(1000, runner.block_bytes), worker, clock=Clock()),
    )
    for number in range(3):
        run(engine, [request(f"r{number}", tokens(161, number), max_tokens=1)])
        assert len(worker.jobs) <= 3
    worker.work()
    answers = Answers()
    engine.add(request("again", tokens(161, 0), max_tokens=1))
    while engine.has_work:
        worker.work()
        answers.take(engine.step())
    assert (
        answers["again", 0].text()
        == run(small_engine(), [request("again", tokens(161, 0), max_tokens=1)])["again", 0].text()
    )


def test_a_block_without_its_window_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the window's group had dropped before the tier took the rest was read from an empty place."""
    monkeypatch.setattr(kv_tier, "_MOST_BYTES", 1)
    worker = Manual()
    engine = tiered(
        windows=(None, 64),
        num_blocks=80,
        window_blocks=63,
        max_model_len=1000,
        tier=lambda runner: KVTier(runner, MemoryStore(1000, runner.block_bytes), worker, clock=Clock()),
    )
    text = tokens(640, 1)
    run(engine, [request("first", text, max_tokens=1)])
    run(engine, [request("second", tokens(570, 2), max_tokens=1)])  # the tier takes one block and is busy
    worker.work()
    assert engine.kv_cache.tier is not None
    engine.kv_cache.tier._most = 1000
    for number in (3, 4):  # all of the first text is evicted
        run(engine, [request("more", tokens(570, number), max_tokens=1)])
    worker.work()
    missing = [block for block in engine.kv_cache.tier._blocks.values() if len(block.groups) == 1]
    assert len(missing) >= 8
    asked = request("again", text[:201], max_tokens=20, ignore_eos=True)
    answers = Answers()
    engine.add(asked)
    while engine.has_work:
        worker.work()
        answers.take(engine.step())
        engine.kv_cache.check()
    plain = small_engine(windows=(None, 64), num_blocks=600, max_model_len=1000)
    assert answers.texts() == run(plain, [asked]).texts()
    assert cached(answers, "again") < 192


# The proof


def _lose_a_slot(tier: KVTier) -> None:
    tier._num_touched += 1


def _forget_a_pin(tier: KVTier) -> None:
    next(iter(tier._blocks.values())).pins += 1


def _use_a_slot_twice(tier: KVTier) -> None:
    one, other = list(tier._blocks.values())[:2]
    one.slot = other.slot


@pytest.mark.parametrize("damage", [_lose_a_slot, _forget_a_pin, _use_a_slot_twice])
def test_check_sees_damage(damage: Callable[[KVTier], None]) -> None:
    engine = tiered(num_blocks=12, max_model_len=190)
    for number in range(3):
        run(engine, [request(f"r{number}", tokens(161, number), max_tokens=1)])
    assert engine.kv_cache.tier is not None
    damage(engine.kv_cache.tier)
    with pytest.raises(HeadraceError, match="second tier of KV blocks is inconsistent"):
        engine.kv_cache.check()


# Real kernels


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_gemma_from_the_tier(gemma3_path: Path, kv_cache_dtype: KVCacheDtype, tmp_path: Path) -> None:
    """Two groups, windows, either format: what comes back is what was there, to the last bit.

    On the best path of the CPU: random schedules on a tiny Gemma, with a tier, go over all of them.
    """
    size = block_bytes(open_checkpoint(gemma3_path).architecture, kv_cache_dtype)
    requests = [
        request(f"r{length}", [2, *tokens(length, length)], max_tokens=4, seed=3, logprobs=2)
        for length in (560, 580, 600)
    ]

    def answers(blocks: int, rounds: int, **tier: Any) -> tuple[list[tuple[object, ...]], Engine]:
        engine = build_engine(
            gemma3_path,
            ModelConfig(max_model_len=640, threads=1),
            CacheConfig(kv_cache_memory_bytes=blocks * size, kv_cache_dtype=kv_cache_dtype, **tier),
            SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=256),
        )
        found = [run(engine, [each])[each.request_id, 0].text() for each in requests * rounds]
        engine.close()
        return found, engine

    plain, _ = answers(400, 1)
    kept = {"swap_space": 0.5, "kv_tier_path": str(tmp_path / "blocks")}
    twice, small = answers(80, 2, **kept)  # two of three prompts fit
    assert {group.window for group in small.kv_cache.groups} == {None, 512}
    assert twice == plain * 2
    assert small.stats().tier_hits > 30
    afterwards, third = answers(80, 1, **kept)
    assert afterwards == plain
    assert third.stats().prefix_cache_hits == 560 + 576 + 592
