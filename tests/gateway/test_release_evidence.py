"""The tests behind canaries: seldom wrong however often they are looked at, and quick where it matters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.gateway.releases import state as states
from headrace.gateway.releases.evidence import Evidence, Sketch, Sums
from headrace.gateway.releases.settings import Canary, Release, Slo
from headrace.gateway.releases.state import Outcome, ReleaseState

RELEASE = Release.model_validate(
    {
        "versions": {"v1": {"model": "a"}, "v2": {"model": "b"}, "v3": {"model": "c"}},
        "canary": {"steps": [10, 50, 100], "hold_s": 10, "min_requests": 20, "give_up_s": 1000},
    }
)


def sums(values: list[float]) -> Sums:
    made = Sums()
    for value in values:
        made.add(value)
    return made


def watched(
    seed: int, stable: float, candidate: float, *, weight: float = 0.2, requests: int = 1000
) -> tuple[float, int]:
    """The least p while requests come one by one, and after how many it was below 0.05."""
    dice, evidence = random.Random(seed), Evidence()
    below = requests
    for number in range(requests):
        ours = dice.random() < weight
        bad = float(dice.random() < (candidate if ours else stable))
        evidence.add(sums([] if ours else [bad]), sums([bad] if ours else []))
        if evidence.p_worse < 0.05:
            below = min(below, number)
    return evidence.p_worse, below


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_equal_versions_are_seldom_called_worse_though_looked_at_all_the_time(share: float) -> None:
    """A test of fixed size, looked at a thousand times, would be wrong about half of the time."""
    wrong = sum(watched(seed, share, share)[0] < 0.05 for seed in range(200))
    assert wrong <= 200 * 0.05 + 5


def test_a_broken_version_is_found_within_a_few_of_its_requests() -> None:
    found = [watched(seed, 0.0, 1.0, weight=0.05)[1] for seed in range(20)]
    assert sorted(found)[10] < 150, "of which the candidate gets 5%"


def test_a_version_that_is_somewhat_worse_is_found() -> None:
    assert sum(watched(seed, 0.02, 0.15, requests=2000)[0] < 0.05 for seed in range(20)) >= 19


def test_a_better_version_is_never_called_worse() -> None:
    assert all(watched(seed, 0.2, 0.05)[0] > 0.05 for seed in range(30))


def test_scores_between_0_and_1_are_no_more_than_failures() -> None:
    """Equal means, different spreads: that is no difference."""
    dice, wrong = random.Random(1), 0
    for _ in range(100):
        evidence = Evidence()
        for _ in range(200):
            evidence.add(sums([0.3]), sums([float(dice.random() < 0.3)]))
        wrong += evidence.p_worse < 0.05
    assert wrong <= 8


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 95.0, 99.0]))
@settings(deadline=None)
def test_percentiles_of_a_sketch_are_right_to_two_percent(values: list[float], percent: float) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[max(-(-len(values) * int(percent) // 100), 1) - 1]
    assert sketch.percentile(percent) == pytest.approx(exact, rel=0.021)
    assert Sketch().percentile(50) is None


def good(seconds: float = 0.1, *, candidate: bool = False) -> Outcome:
    return Outcome(candidate, failed=False, e2e_s=seconds)


class Trial:
    """A canary of v2, driven by hand."""

    def __init__(self, **slo: float) -> None:
        self.state = ReleaseState("v1")
        self.now = 0.0
        canary = RELEASE.canary.model_copy(update={"slo": Slo(**slo)})
        self.release = RELEASE.model_copy(update={"canary": canary})
        states.start("r", self.release, self.state, "v2", trial="t", ab=None, now=0.0)

    def step(self, outcomes: list[Outcome], seconds: float = 1.0) -> states.Event | None:
        self.now += seconds
        assert self.state.trial is not None
        states.learn(self.state.trial, outcomes, self.release.canary)
        return states.decide("r", self.release, self.state, now=self.now)


def test_a_good_candidate_goes_from_step_to_step_after_time_and_requests() -> None:
    trial = Trial()
    some = [good(), good(candidate=True)]
    assert trial.step(some * 19, seconds=100) is None, "one request short"
    advanced = trial.step(some)
    assert advanced is not None
    assert (advanced.what, advanced.detail) == ("advanced", "to 50% of the requests")
    assert trial.step(some * 30, seconds=9) is None, "too early"
    promoted = trial.step([])
    while promoted is None:
        promoted = trial.step(some)
    assert promoted.what == "promoted"
    assert (trial.state.stable, trial.state.previous, trial.state.trial) == ("v2", "v1", None)


def test_a_slow_candidate_goes_back_and_says_why() -> None:
    trial, event = Trial(), None
    dice = random.Random(2)
    for _ in range(50):
        fast = [good(dice.uniform(0.09, 0.11)) for _ in range(9)]
        event = event or trial.step([*fast, good(0.2, candidate=True)])
        if event is not None:
            break
    assert event is not None
    assert event.what == "rolled_back"
    assert event.detail.startswith("E2E p95 is 0.19")
    assert trial.state.stable == "v1"


def test_a_slower_candidate_may_pass_where_it_keeps_the_slo() -> None:
    trial, event = Trial(e2e_s=0.5), None
    while event is None or event.what == "advanced":
        event = trial.step([good(), good(0.3, candidate=True)])
    assert event.what == "promoted"


def test_a_candidate_that_breaks_the_slo_goes_back_unless_the_stable_one_does_too() -> None:
    trial, event = Trial(e2e_s=0.25), None
    while event is None:
        event = trial.step([good(), good(0.3, candidate=True)])
    assert event.what == "rolled_back"
    assert "over the SLO of 0.25 s" in event.detail
    both = Trial(e2e_s=0.25)
    assert all(both.step([good(0.3), good(0.3, candidate=True)]) is None for _ in range(100))


def test_what_is_worse_but_not_surely_so_waits_and_is_given_up_at_last() -> None:
    trial = Trial()
    outcomes = [good()] * 30 + [good(candidate=True)] * 29 + [Outcome(True, failed=True)]
    assert trial.step(outcomes, seconds=50) is None, "one of 30 failed: no proof, and no reason to go on"
    event = trial.step([], seconds=1000)
    assert event is not None
    assert event.what == "rolled_back"
    assert "1000 seconds" in event.detail


def test_a_candidate_that_clients_give_up_goes_back() -> None:
    """It hangs: nothing of it ever ends but by its clients, who have waited for long."""
    trial, event = Trial(), None
    for _ in range(50):
        event = trial.step([good()] * 5 + [Outcome(True, e2e_s=1.0), Outcome(True, e2e_s=0.01)])
        if event is not None:
            break
    assert event is not None
    assert event.what == "rolled_back"
    assert event.detail.startswith("E2E p95 is 0.98")
    assert trial.state.last is not None
    assert trial.state.last.candidate_seen.requests == 0


def test_a_bad_score_rolls_back() -> None:
    trial, event = Trial(), None
    for _ in range(200):
        event = trial.step([Outcome(False, score=0.9), Outcome(True, score=0.5)])
        if event is not None:
            break
    assert event is not None
    assert "the mean score is 0.5" in event.detail


def test_an_ab_test_decides_nothing() -> None:
    state = ReleaseState("v1")
    states.start("r", RELEASE, state, "v2", trial="t", ab=50, now=0.0)
    assert state.trial is not None
    states.learn(state.trial, [good(), Outcome(True, failed=True)] * 100, Canary())
    assert states.decide("r", RELEASE, state, now=1e9) is None


def test_rollback_after_a_promotion_goes_back_and_forth() -> None:
    state = ReleaseState("v1")
    states.promote("r", RELEASE, state, "v3", now=0.0)
    states.roll_back("r", RELEASE, state, now=0.0)
    assert (state.stable, state.previous) == ("v1", "v3")
    for wrong, said in (("v1", "stable version already"), ("v9", "it has: v1, v2, v3")):
        with pytest.raises(ConfigError, match=said):
            states.start("r", RELEASE, state, wrong, trial="t", ab=None, now=0.0)
    with pytest.raises(ConfigError, match="name the version"):
        states.promote("r", RELEASE, state, None, now=0.0)
    with pytest.raises(ConfigError, match="no version was there before v1"):
        states.roll_back("r", RELEASE, ReleaseState("v1"), now=0.0)
