"""Groups with a window keep only what it shows: less memory, the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from small_engines import Answers, finish, request, run, small_engine, tokens
from test_kv_cache import cached_tokens

from headrace.engine.build import blocks_by_window, build_engine
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.memory import block_bytes, group_block_bytes
from headrace.model.weights import open_checkpoint

WINDOW = 64


def used(engine: Engine, group: int) -> int:
    """Blocks that tables of a group refer to."""
    return sum(count > 0 for count in engine.kv_cache.pools[group].references)


def windowed_engine(**settings: object) -> Engine:
    settings = {"num_blocks": 600, "window_blocks": 64, "max_model_len": 1000} | settings
    return small_engine(windows=(None, WINDOW), **settings)  # type: ignore[arg-type]


def test_a_sequence_holds_its_window_and_no_more() -> None:
    """A context of 900 tokens kept 57 blocks in a group that looks at 64 tokens."""
    engine = windowed_engine(max_num_batched_tokens=64)
    engine.add(request("r", tokens(500, 1), max_tokens=400, ignore_eos=True))
    answers, most = Answers(), 0
    while engine.has_work:
        answers.take(engine.step())
        engine.kv_cache.check()
        if len(answers) and answers["r", 0].token_ids:
            most = max(most, used(engine, 1))
    assert len(answers["r", 0].token_ids) == 400
    assert most <= WINDOW // 16 + 2


def test_many_long_sequences_fit_where_few_did() -> None:
    """Four sequences of 500 tokens filled 128 blocks of each group; the windowed one needs 24 for them."""
    engine = windowed_engine(num_blocks=200, window_blocks=64, max_num_batched_tokens=256, max_num_seqs=8)
    for number in range(5):
        engine.add(request(f"r{number}", tokens(450, number), max_tokens=100, ignore_eos=True))
    most = 0
    answers = Answers()
    while engine.has_work:
        answers.take(engine.step())
        engine.kv_cache.check()
        most = max(most, engine.stats().num_running_seqs)
    assert most == 5
    assert engine.stats().num_preemptions == 0
    assert all(len(answer.token_ids) == 100 for answer in answers.values())


@pytest.mark.parametrize("chunk", [16, 48, 512])
@pytest.mark.parametrize("window_blocks", [63, 70, 200])
def test_answers_and_hits_are_those_of_whole_sequences(chunk: int, window_blocks: int) -> None:
    """A prefix was found in the groups without a window only, and the other read what was long gone."""
    shared = tokens(300, 9)
    requests = [
        request(f"r{i}", shared[: 60 + 48 * i] + tokens(5, i), max_tokens=60, ignore_eos=True, logprobs=1)
        for i in range(6)
    ]
    plain = small_engine(windows=(None, WINDOW), num_blocks=600, max_model_len=1000)
    expected = run(plain, requests).texts()
    engine = windowed_engine(window_blocks=window_blocks, max_num_batched_tokens=chunk)
    assert run(engine, requests).texts() == expected
    assert run(engine, requests).texts() == expected
    assert engine.stats().prefix_cache_hits > 500


def test_a_prefix_counts_as_far_as_its_end_is_there() -> None:
    """The end of a conversation is found; its middle, which the window's group has dropped, is not."""
    engine = windowed_engine(num_blocks=600, window_blocks=63)
    text = tokens(640, 1)
    run(engine, [request("first", text, max_tokens=1)])
    # 40 of 63 blocks are idle; this one needs 36 and takes the 13 oldest.
    run(engine, [request("other", tokens(570, 2), max_tokens=1)])
    assert [cached_tokens(engine, text[:length]) for length in (640, 300, 150)] == [624, 288, 0]
    again = run(engine, [request("again", text[:150], max_tokens=1), request("all", text, max_tokens=1)])
    assert again["again", 0].last.num_cached_tokens == 0  # type: ignore[union-attr]
    assert again["all", 0].last.num_cached_tokens == 624  # type: ignore[union-attr]


def test_blocks_are_reused_while_a_sequence_runs() -> None:
    """Nothing may read a block that another has taken: each answer is checked against one alone."""
    engine = windowed_engine(window_blocks=63, prefix_caching=False, max_num_batched_tokens=128)
    requests = [request(f"r{i}", tokens(200 + 7 * i, i), max_tokens=200, ignore_eos=True) for i in range(9)]
    answers = run(engine, requests)
    for each in requests[::4]:
        alone = small_engine(windows=(None, WINDOW), num_blocks=600, max_model_len=1000)
        assert run(alone, [each])[each.request_id, 0].text() == answers[each.request_id, 0].text()


def _lose_the_window(engine: Engine) -> None:
    engine.kv_cache.groups[1].first[engine.scheduler._running[0].row] = 0


def _wake_an_idle_block(engine: Engine) -> None:
    engine.kv_cache.groups[1].idle.popitem()


@pytest.mark.parametrize("damage", [_lose_the_window, _wake_an_idle_block])
def test_check_sees_damage(damage: Callable[[Engine], None]) -> None:
    engine = windowed_engine(max_num_batched_tokens=64)
    engine.add(request("r", tokens(300, 1), max_tokens=50, ignore_eos=True))
    for _ in range(8):
        engine.step()
    engine.kv_cache.check()
    damage(engine)
    with pytest.raises(Exception, match="inconsistent"):
        engine.kv_cache.check()
    with pytest.raises(Exception, match="inconsistent"):
        finish(engine, Answers())


# Gemma 3: fifteen layers with a window of 512 tokens, three without


def test_what_the_windows_save_goes_to_whole_sequences(gemma3_path: Path) -> None:
    architecture = open_checkpoint(gemma3_path).architecture
    cache = CacheConfig(kv_cache_memory_bytes=512 * 2**20)
    few = SchedulerConfig(max_num_seqs=8)
    equal = cache.kv_cache_memory_bytes // block_bytes(architecture)
    num_blocks, group_blocks = blocks_by_window(architecture, cache, few, longest=4096)
    assert num_blocks > 3 * equal
    sizes = group_block_bytes(architecture)
    total = sum(count * size for count, size in zip(group_blocks, sizes, strict=True))
    assert total <= cache.kv_cache_memory_bytes
    assert blocks_by_window(architecture, cache, few, longest=32768) == (equal, ())


class Gemma(NamedTuple):
    """A model, and sizes of its pool at which its windows save nothing, and something."""

    path: Path
    window: int
    prompt: int  # tokens
    longest: int
    few_blocks: int
    more_blocks: int


@pytest.fixture(params=[pytest.param("tiny", marks=pytest.mark.native), "gemma3-270m"])
def gemma(request: pytest.FixtureRequest, tmp_path: Path) -> Gemma:
    """One that is tiny on every path of the CPU, and the real one on the best."""
    if request.param == "gemma3-270m":
        return Gemma(request.getfixturevalue("gemma3_path"), 512, 561, 640, 50, 140)
    from tests.model.tiny import CASES

    CASES["gemma3"](tmp_path)
    return Gemma(tmp_path, 24, 261, 304, 24, 40)


def test_gemma_says_the_same_in_less_memory(gemma: Gemma) -> None:
    """Kernels read whole the tile in which a window begins: what was given back must be harmless."""
    size = block_bytes(open_checkpoint(gemma.path).architecture)
    prompt = [2, *tokens(gemma.prompt - 1, 1)]
    shared = gemma.prompt - 16
    requests = [
        request("first", prompt, max_tokens=12, temperature=0.0, logprobs=2),
        request("second", [*prompt[:shared], *tokens(9, 2)], max_tokens=12, seed=3, logprobs=2),
    ]

    def answers(blocks: int) -> tuple[list[tuple[object, ...]], Engine]:
        engine = build_engine(
            gemma.path,
            ModelConfig(max_model_len=gemma.longest, threads=1),
            CacheConfig(kv_cache_memory_bytes=blocks * size),
            SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=256),
        )
        found = [run(engine, [each])[each.request_id, 0].text() for each in requests]
        engine.close()
        return found, engine

    plain, large = answers(gemma.few_blocks)
    windowed, small = answers(gemma.more_blocks)
    assert large.kv_cache.groups[0].window is large.kv_cache.groups[1].window is None
    assert {group.window for group in small.kv_cache.groups} == {None, gemma.window}
    assert windowed == plain
    assert small.stats().prefix_cache_hits == large.stats().prefix_cache_hits == shared // 16 * 16
