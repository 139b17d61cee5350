"""Blocks: which are evicted, what counts as the same content, and whether check() sees a leak."""

from __future__ import annotations

import pytest
from small_engines import VOCAB, Answers, finish, request, run, small_engine, tokens

from headrace.engine import kv_cache
from headrace.engine.engine import Engine
from headrace.engine.prefix_cache import CachedBlock, PrefixCache
from headrace.engine.sequence import Request
from headrace.errors import HeadraceError


def cached_tokens(engine: Engine, prompt: list[int]) -> int:
    """How many tokens of ``prompt`` would be found in the cache now."""
    probe = Request(request("probe", prompt), number=0, seed=0, now=0.0, vocab_size=VOCAB)
    prefix = engine.kv_cache.find_prefix(probe.sequences[0])
    assert prefix is not None
    return 16 * len(prefix)


def test_the_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    """Evicting a parent first left its children in the cache, unreachable and useless."""
    engine = small_engine(num_blocks=12, max_model_len=190)
    old, new = tokens(65, 1), tokens(65, 2)  # four full blocks and one token each
    run(engine, [request("old", old, max_tokens=1)])
    run(engine, [request("new", new, max_tokens=1)])
    assert len(engine.kv_cache.prefix_cache) == 8
    run(engine, [request("more", tokens(90, 3), max_tokens=1)])  # six blocks: two of the oldest have to go
    assert cached_tokens(engine, old) == 32
    assert cached_tokens(engine, new) == 64


def test_use_keeps_a_block_young() -> None:
    """First in, first out would have thrown the busiest system prompt away."""
    engine = small_engine(num_blocks=12, max_model_len=190)
    old, new = tokens(65, 1), tokens(65, 2)
    run(engine, [request("old", old, max_tokens=1)])
    run(engine, [request("new", new, max_tokens=1)])
    run(engine, [request("old again", old, max_tokens=1)])
    run(engine, [request("more", tokens(90, 3), max_tokens=1)])
    assert cached_tokens(engine, old) == 64


@pytest.mark.parametrize("prompts", [2, 6])
def test_equal_hashes_do_not_share(monkeypatch: pytest.MonkeyPatch, prompts: int) -> None:
    """A hit by hash alone would have continued one client's text from another's."""
    requests = [request(f"r{i}", tokens(50, i), max_tokens=40, ignore_eos=True) for i in range(prompts)]
    expected = run(small_engine(), requests).texts()
    monkeypatch.setattr(kv_cache, "block_key", lambda parent, tokens: b"the same for all")
    engine = small_engine()
    assert run(engine, requests).texts() == expected
    assert run(engine, requests).texts() == expected


def test_equal_tokens_behind_another_parent_are_not_found() -> None:
    """K and V depend on everything before them: equal tokens under one hash are not yet equal content."""
    cache = PrefixCache()
    one, other = CachedBlock(b"1", None, b"a", "", [0]), CachedBlock(b"2", None, b"b", "", [1])
    child = CachedBlock(b"3", one, b"c", "", [2])
    for block in (one, other, child):
        cache.insert(block)
    assert cache.find(b"3", one, b"c", "") is child
    assert cache.find(b"3", other, b"c", "") is None
    assert cache.find(b"3", None, b"c", "") is None
    assert cache.find(b"1", None, b"a", "salt") is None


def test_the_same_text_computed_twice_is_kept_once() -> None:
    """Sequences that generate the same text filled the cache with copies of it."""
    engine = small_engine(num_blocks=64)
    # Equal texts that could not wait for each other: the tokens were not known before they were sampled.
    run(engine, [request("r", tokens(5, 1), n=3, temperature=0.0, max_tokens=100, ignore_eos=True)])
    assert len(engine.kv_cache.prefix_cache) == 104 // 16


def test_groups_have_blocks_of_their_own() -> None:
    """A backend that read one group's table for another would go unnoticed if both were equal."""
    engine = small_engine(windows=(None, 32))
    engine.add(request("r", tokens(60, 1), max_tokens=1))
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None
    assert batch.block_tables[0].tolist() != batch.block_tables[1].tolist()
    engine.scheduler.commit(engine.runner.run(batch), 0.0, 0.0)
    finish(engine, Answers())


def test_hits_hold_in_every_group() -> None:
    """A prefix found in the global group only was read from stale blocks in the windowed one."""
    engine = small_engine(windows=(None, 32, 16))
    prompt = tokens(80, 1)
    cold = run(engine, [request("r", prompt, max_tokens=30)])
    warm = run(engine, [request("r", prompt, max_tokens=30)])
    assert warm.texts() == cold.texts()
    assert warm["r", 0].last.num_cached_tokens == 64  # type: ignore[union-attr]


def _leak(engine: Engine) -> None:
    engine.kv_cache.pools[0].take()


def _lose_a_reference(engine: Engine) -> None:
    engine.kv_cache.pools[0].references[
        int(engine.kv_cache._tables[0][engine.scheduler._running[0].row, 0])
    ] += 1


def _free_what_is_used(engine: Engine) -> None:
    engine.kv_cache.pools[0].reclaim(int(engine.kv_cache._tables[0][engine.scheduler._running[0].row, 0]))


def _forget_a_user(engine: Engine) -> None:
    engine.kv_cache.prefix_cache.drop(engine.kv_cache.prefix_cache.all_blocks()[0])


@pytest.mark.parametrize("damage", [_leak, _lose_a_reference, _free_what_is_used, _forget_a_user])
def test_check_sees_damage(damage: object) -> None:
    """A check that never fails proves nothing."""
    engine = small_engine(num_blocks=16, max_model_len=200)
    engine.add(request("r", tokens(40, 1), max_tokens=50, ignore_eos=True))
    engine.step()
    engine.kv_cache.check()
    damage(engine)  # type: ignore[operator]
    with pytest.raises(HeadraceError, match="inconsistent"):
        engine.kv_cache.check()
