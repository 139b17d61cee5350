"""An upstream's health over time, and counts of what it has in hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.config import Health, ServedModel, UpstreamConfig
from headrace.gateway.health import HealthState
from headrace.gateway.upstream import Upstream, Work


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def state(clock: Clock, **settings: Any) -> HealthState:
    return HealthState(
        Health(**{"eject_after": 2, "eject_s": 4, "eject_max_s": 10, "recover_s": 10} | settings), clock
    )


def test_it_comes_back_slowly_and_one_failure_sends_it_away_for_longer(clock: Clock) -> None:
    health = state(clock)
    health.failed()
    assert health.share() == 1.0
    health.failed()
    assert health.share() == 0.0
    clock.now += 4
    assert health.share() == pytest.approx(0.1)
    clock.now += 5
    assert health.share() == pytest.approx(0.5)
    health.failed()
    clock.now += 7.9
    assert health.share() == 0.0, "twice as long as before"
    clock.now += 0.2 + 10
    assert health.share() == 1.0
    health.succeeded()
    health.failed()
    assert health.share() == 1.0, "whole again: one failure is none in a row"


def test_probes_eject_and_heal_nothing(clock: Clock) -> None:
    health = state(clock)
    health.failed()
    health.probed(good=True)
    health.failed()
    assert health.share() == 0.0, "a server that answers probes only is ejected as well"
    clock.now += 100
    health.probed(good=False)
    health.probed(good=False)
    assert health.share() == 0.0


def test_rests_without_a_length_double_until_it_takes_requests_again(clock: Clock) -> None:
    health = state(clock)
    lengths = []
    for _ in range(6):
        health.rest(None)
        health.rest(None)  # what was under way already is refused as well
        lengths.append(health.resting_until - clock.now)
        clock.now = health.resting_until
    assert lengths == [1, 2, 4, 8, 10, 10]
    assert not health.resting()
    health.accepted()
    health.rest(None)
    assert health.resting_until - clock.now == 1
    health.rest(30.0)
    assert health.resting_until - clock.now == 30, "what it says holds"
    assert health.share() == 1.0, "being busy is no failure"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5000), st.tuples(st.integers(0, 30)))))
def test_counts_are_never_negative_and_exactly_0_when_idle(steps: list[int | tuple[int]]) -> None:
    """Numbers begin requests of so many tokens; tuples end one of those, perhaps a second time."""
    config = UpstreamConfig(url="http://127.0.0.1:1/v1", models={"m": ServedModel()})
    upstream = Upstream("u", config, Health())
    works: list[tuple[Work, int]] = []
    ended: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            works.append((upstream.begin(step), step))
        elif works:
            at = step[0] % len(works)
            works[at][0].end()
            ended.add(at)
        left = [tokens for at, (_, tokens) in enumerate(works) if at not in ended]
        assert (upstream.in_flight, upstream.outstanding_tokens) == (len(left), sum(left))
    for work, _ in works:
        work.end()
        work.end()
    assert (upstream.in_flight, upstream.outstanding_tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 10.0)), max_size=40))
def test_the_time_of_an_upstreams_hardware_is_shared_by_who_uses_it(steps: list[tuple[int, float]]) -> None:
    """Whatever begins and ends: all together pay for the time that it works on anything, nobody for more."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("headrace.gateway.upstream.time.monotonic", clock)
        config = UpstreamConfig(url="http://127.0.0.1:1/v1", models={"m": ServedModel()}, usd_per_hour=3600.0)
        upstream, busy_s = Upstream("u", config, Health()), 0.0
        works: dict[int, tuple[Work, float]] = {}
        ended: list[float] = []
        for number, wait_s in steps:
            busy_s += wait_s if works else 0.0
            clock.now += wait_s
            if number in works:
                work, began = works.pop(number)
                work.end()
                work.end()
                ended.append(work.usd)
                assert work.usd <= clock.now - began + 1e-9
            else:
                works[number] = upstream.begin(10), clock.now
        assert sum(ended) + sum(work.usd for work, _ in works.values()) == pytest.approx(busy_s)
