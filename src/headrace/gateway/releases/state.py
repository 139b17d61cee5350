"""A release's state and what changes it. Nothing in here reads a clock or a file.

All functions that start or end something raise ConfigError if that is not possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.errors import ConfigError
from headrace.gateway.releases.evidence import Evidence, Sketch, Sums
from headrace.gateway.releases.settings import Canary, Release

LATENCIES = ("ttft", "tpot", "e2e")
MEASURES = ("failed", *LATENCIES, "score")
KIND = {"canary": "a canary", "ab": "an A/B test"}

Kind = Literal["canary", "ab"]
What = Literal["started", "advanced", "promoted", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request of a trial's ended. ``score``: 0 (bad) to 1, alone in its outcome.

    ``failed`` is None for a request that its client gave up: it would have taken longer than the seconds say.
    """

    candidate: bool
    failed: bool | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    score: float | None = None

    def seconds(self, measure: str) -> float | None:
        """One of LATENCIES."""
        value: float | None = getattr(self, f"{measure}_s")
        return value


class Variant(msgspec.Struct):
    """What is known of one side of a trial."""

    requests: int = 0
    latencies: dict[str, Sketch] = msgspec.field(
        default_factory=lambda: {name: Sketch() for name in LATENCIES}
    )


class Trial(msgspec.Struct):
    """A candidate beside the stable version. Times are seconds since 1970.

    ``thresholds``: of latencies, in seconds; fixed by an SLO, or once the stable version has shown enough of
    itself. ``slos``: the names of those by an SLO.
    """

    id: str
    kind: Kind
    stable: str
    candidate: str
    weight: float  # the candidate's percent of requests
    started_at: float
    step_at: float
    step: int = 0
    step_requests: int = 0  # the candidate's in this step
    stable_seen: Variant = msgspec.field(default_factory=Variant)
    candidate_seen: Variant = msgspec.field(default_factory=Variant)
    thresholds: dict[str, float] = msgspec.field(default_factory=dict)
    slos: list[str] = msgspec.field(default_factory=list)
    evidence: dict[str, Evidence] = msgspec.field(
        default_factory=lambda: {name: Evidence() for name in MEASURES}
    )
    ended_at: float | None = None
    verdict: str = ""


class ReleaseState(msgspec.Struct):
    """``stable`` serves what no trial takes from it. ``previous``: what it took the place of."""

    stable: str
    previous: str | None = None
    trial: Trial | None = None
    last: Trial | None = None  # the trial that ended last

    def version(self, *, candidate: bool) -> str:
        """The name of a side's version."""
        return self.trial.candidate if candidate and self.trial is not None else self.stable


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a release, for its history."""

    what: What
    version: str
    detail: str


def check(name: str, release: Release, state: ReleaseState) -> None:
    """Raises ConfigError if the state names versions that the file does not have."""
    trial = state.trial
    if trial is not None and trial.candidate not in release.versions:
        raise ConfigError(
            f"releases: {name}: {trial.candidate} is in {KIND[trial.kind]}, but not among the versions; "
            f"put it back, or end that with `headrace gateway releases rollback`"
        )
    if state.stable not in release.versions:
        raise ConfigError(
            f"releases: {name}: {state.stable} serves it, but is not among the versions; "
            f"put it back, or `headrace gateway releases promote` another one first"
        )


def start(
    name: str,
    release: Release,
    state: ReleaseState,
    version: str,
    *,
    trial: str,
    ab: float | None,
    now: float,
) -> Event:
    """Begin a canary, or an A/B test that gives ``ab`` percent to the version. ``trial``: its id."""
    _known(name, release, version)
    if state.trial is not None:
        running = state.trial
        raise ConfigError(
            f"{name}: {running.candidate} is in {KIND[running.kind]}; promote it or roll it back first"
        )
    if version == state.stable:
        raise ConfigError(f"{name}: {version} is the stable version already")
    kind: Kind = "canary" if ab is None else "ab"
    weight = release.canary.steps[0] if ab is None else ab
    state.trial = Trial(trial, kind, state.stable, version, weight, now, now)
    if ab is None:
        slo = {name: getattr(release.canary.slo, f"{name}_s") for name in LATENCIES}
        state.trial.thresholds = {name: seconds for name, seconds in slo.items() if seconds is not None}
        state.trial.slos = list(state.trial.thresholds)
    if weight >= 100:
        return promote(name, release, state, None, now=now, why="its only step is all requests")
    return Event("started", version, f"{KIND[kind]} with {weight:g}% of the requests")


def promote(
    name: str,
    release: Release,
    state: ReleaseState,
    version: str | None,
    *,
    now: float,
    why: str = "asked for",
) -> Event:
    """Make the candidate the stable version, or ``version``, whatever it is."""
    if version is None:
        if state.trial is None:
            raise ConfigError(f"{name}: nothing is on trial; name the version to promote")
        version = state.trial.candidate
    _known(name, release, version)
    _end(state, now, f"promoted: {why}" if state.trial and state.trial.candidate == version else "ended")
    if version != state.stable:
        state.previous, state.stable = state.stable, version
    return Event("promoted", version, why)


def roll_back(
    name: str, release: Release, state: ReleaseState, *, now: float, why: str = "asked for"
) -> Event:
    """End the trial for the stable version; without one, go back to the version before this one."""
    if state.trial is not None:
        version = state.trial.candidate
        _end(state, now, f"rolled back: {why}")
        return Event("rolled_back", version, why)
    if state.previous is None:
        raise ConfigError(f"{name}: nothing is on trial, and no version was there before {state.stable}")
    _known(name, release, state.previous)
    version = state.stable
    state.stable, state.previous = state.previous, version
    return Event("rolled_back", version, why)


def _end(state: ReleaseState, now: float, verdict: str) -> None:
    if state.trial is not None:
        state.trial.ended_at, state.trial.verdict = now, verdict
        state.last, state.trial = state.trial, None


def _known(name: str, release: Release, version: str) -> None:
    if version not in release.versions:
        raise ConfigError(f"{name} has no version {version}; it has: {', '.join(release.versions)}")


def learn(trial: Trial, outcomes: Iterable[Outcome], settings: Canary) -> None:
    """Take in outcomes that came since the last time: one block of the tests."""
    tolerated = 1 + (settings.tolerated.latency if trial.kind == "canary" else 0.0)
    blocks = {name: (Sums(), Sums()) for name in MEASURES}
    for outcome in outcomes:
        seen = trial.candidate_seen if outcome.candidate else trial.stable_seen
        side = int(outcome.candidate)
        if outcome.score is not None:
            blocks["score"][side].add(1 - outcome.score)
        if outcome.failed is not None:
            seen.requests += 1
            trial.step_requests += outcome.candidate
            blocks["failed"][side].add(float(outcome.failed))
        for name in LATENCIES:
            if (seconds := outcome.seconds(name)) is None:
                continue
            threshold = trial.thresholds.get(name)
            allowed = tolerated if outcome.candidate and name not in trial.slos else 1.0
            scaled = seconds / allowed
            if outcome.failed is None and (threshold is None or scaled <= threshold):
                continue  # nobody knows whether it would have been in time
            if threshold is not None:
                blocks[name][side].add(float(scaled > threshold))
            seen.latencies[name].add(seconds)
    for name, (stable, candidate) in blocks.items():
        trial.evidence[name].add(stable, candidate)
    for name in LATENCIES:  # from here on, and of nothing that is tested by it
        sketch = trial.stable_seen.latencies[name]
        if name not in trial.thresholds and sketch.count >= settings.min_requests:
            threshold = sketch.percentile(settings.percentile)
            assert threshold is not None
            trial.thresholds[name] = threshold


def is_due(release: Release, trial: Trial, now: float) -> bool:
    """Whether time alone may change what :func:`decide` says."""
    settings = release.canary
    return now - trial.step_at >= settings.hold_s or now - trial.started_at >= settings.give_up_s


def decide(name: str, release: Release, state: ReleaseState, *, now: float) -> Event | None:
    """What a canary's evidence asks for: back, one step on, all the way, or nothing yet."""
    trial, settings = state.trial, release.canary
    if trial is None or trial.kind != "canary":
        return None
    enough = math.log(len(MEASURES) / settings.alpha)  # Bonferroni: any of the measures may raise the alarm
    for measure in MEASURES:
        if trial.evidence[measure].worse >= enough and (alarm := worse(trial, measure, settings)):
            others = [worse(trial, other, settings) for other in MEASURES if other != measure]
            why = "; ".join([alarm, *filter(None, others)])  # one cause shows in several of them
            return roll_back(name, release, state, now=now, why=why)
    if now - trial.step_at >= settings.hold_s and trial.step_requests >= settings.min_requests:
        doubtful = [measure for measure in MEASURES if worse(trial, measure, settings)]
        if not doubtful:
            return _advance(name, release, state, now)
    if now - trial.started_at >= settings.give_up_s:
        why = f"not promoted within {settings.give_up_s:g} seconds"
        return roll_back(name, release, state, now=now, why=why)
    return None


def _advance(name: str, release: Release, state: ReleaseState, now: float) -> Event:
    trial = state.trial
    assert trial is not None
    # the file may have other steps by now: the next one is the first that is more
    following = next((step for step in release.canary.steps if step > trial.weight), 100.0)
    if following >= 100:
        return promote(name, release, state, None, now=now, why="no regression in any step")
    trial.weight, trial.step, trial.step_at, trial.step_requests = following, trial.step + 1, now, 0
    return Event("advanced", trial.candidate, f"to {following:g}% of the requests")


def worse(trial: Trial, measure: str, settings: Canary) -> str:
    """By how much the candidate looks worse than is tolerated, in words; empty if it does not."""
    tolerated, evidence = settings.tolerated, trial.evidence[measure]
    if measure in LATENCIES:
        ours = trial.candidate_seen.latencies[measure].percentile(settings.percentile)
        theirs = trial.stable_seen.latencies[measure].percentile(settings.percentile)
        if measure in trial.slos:
            if ours is None or ours <= trial.thresholds[measure]:
                return ""
            slo = trial.thresholds[measure]
            return f"{measure.upper()} p{settings.percentile:g} is {ours:.4g} s, over the SLO of {slo:g} s"
        if ours is None or theirs is None or ours <= theirs * (1 + tolerated.latency):
            return ""
        return f"{measure.upper()} p{settings.percentile:g} is {ours:.4g} s, of {trial.stable} {theirs:.4g} s"
    most = tolerated.failed if measure == "failed" else tolerated.score
    if not evidence.candidate.count or evidence.candidate.mean - evidence.stable.mean <= most:
        return ""
    if measure == "failed":
        ours, theirs = evidence.candidate.mean, evidence.stable.mean
        return f"{ours:.2%} of the requests failed, of {trial.stable} {theirs:.2%}"
    ours, theirs = 1 - evidence.candidate.mean, 1 - evidence.stable.mean
    return f"the mean score is {ours:.3f}, of {trial.stable} {theirs:.3f}"
