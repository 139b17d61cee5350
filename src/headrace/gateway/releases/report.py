"""What a release's trial has shown so far: numbers a side, and how sure they are."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.releases.book import PastEvent
from headrace.gateway.releases.settings import Release
from headrace.gateway.releases.state import LATENCIES, MEASURES, ReleaseState, Trial, Variant


@dataclass(frozen=True, slots=True)
class Summary:
    """What serves a release, and what is on trial with how many percent."""

    release: str
    stable: str
    previous: str | None
    trial: str | None
    candidate: str | None
    weight: float | None
    versions: list[str]


def summary(name: str, release: Release, state: ReleaseState) -> Summary:
    """A release in one line."""
    trial = state.trial
    return Summary(
        release=name,
        stable=state.stable,
        previous=state.previous,
        trial=trial.kind if trial is not None else None,
        candidate=trial.candidate if trial is not None else None,
        weight=trial.weight if trial is not None else None,
        versions=list(release.versions),
    )


@dataclass(frozen=True, slots=True)
class Side:
    """One version in a trial. Latencies in seconds, at the watched percentile and the median."""

    version: str
    weight: float
    requests: int
    failed: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    median_ttft_s: float | None
    median_tpot_s: float | None
    median_e2e_s: float | None
    scores: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Test:
    """A measure compared. Both p-values hold whenever they are looked at."""

    measure: str
    p_worse: float
    p_differs: float
    stable_count: int
    candidate_count: int


@dataclass(frozen=True, slots=True)
class Report:
    """A release now. ``trial`` is the one under way, or the last one if ``ended_at`` is set."""

    release: str
    stable: str
    previous: str | None
    versions: list[str]
    kind: str | None
    started_at: float | None
    ended_at: float | None
    verdict: str
    percentile: float
    alpha: float
    sides: list[Side]
    tests: list[Test]
    history: list[PastEvent]


def report(name: str, release: Release, state: ReleaseState, history: list[PastEvent]) -> Report:
    """The release's trial under way, else its last one."""
    trial = state.trial or state.last
    percentile = release.canary.percentile
    sides: list[Side] = []
    tests: list[Test] = []
    if trial is not None:
        sides = [
            _side(trial, trial.stable, 100 - trial.weight, trial.stable_seen, percentile, candidate=False),
            _side(trial, trial.candidate, trial.weight, trial.candidate_seen, percentile, candidate=True),
        ]
        tests = [_test(trial, measure) for measure in MEASURES]
    return Report(
        release=name,
        stable=state.stable,
        previous=state.previous,
        versions=list(release.versions),
        kind=trial.kind if trial is not None else None,
        started_at=trial.started_at if trial is not None else None,
        ended_at=trial.ended_at if trial is not None else None,
        verdict=trial.verdict if trial is not None else "",
        percentile=percentile,
        alpha=release.canary.alpha,
        sides=sides,
        tests=tests,
        history=history,
    )


def _side(
    trial: Trial, version: str, weight: float, seen: Variant, percentile: float, *, candidate: bool
) -> Side:
    scores = trial.evidence["score"]
    # what waits for the other side's outcomes is part of what was seen
    sums = (
        [scores.candidate, scores.waiting_candidate] if candidate else [scores.stable, scores.waiting_stable]
    )
    failed = trial.evidence["failed"]
    failures = (
        [failed.candidate, failed.waiting_candidate] if candidate else [failed.stable, failed.waiting_stable]
    )
    count = sum(part.count for part in sums)
    at = {name: seen.latencies[name].percentile(percentile) for name in LATENCIES}
    half = {name: seen.latencies[name].percentile(50.0) for name in LATENCIES}
    return Side(
        version=version,
        weight=weight,
        requests=seen.requests,
        failed=sum(part.bad for part in failures) / seen.requests if seen.requests else None,
        ttft_s=at["ttft"],
        tpot_s=at["tpot"],
        e2e_s=at["e2e"],
        median_ttft_s=half["ttft"],
        median_tpot_s=half["tpot"],
        median_e2e_s=half["e2e"],
        scores=count,
        score=1 - sum(part.bad for part in sums) / count if count else None,
    )


def _test(trial: Trial, measure: str) -> Test:
    evidence = trial.evidence[measure]
    return Test(
        measure,
        evidence.p_worse,
        evidence.p_differs,
        evidence.stable.count,
        evidence.candidate.count,
    )
