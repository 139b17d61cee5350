"""Releases as requests see them: which version serves, how it did, and what follows from that."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, StateError
from headrace.gateway.releases import state as states
from headrace.gateway.releases.book import ReleaseBook
from headrace.gateway.releases.settings import Release, Version
from headrace.gateway.releases.state import Event, Outcome, ReleaseState, Trial

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from headrace.gateway.context import RequestContext
    from headrace.gateway.metrics import Metrics
    from headrace.gateway.store import Store

KEY_HEADER = "x-headrace-key"
TICK_S = 0.5
_MOST_KEPT = 100_000  # outcomes between two ticks


class Releases:
    """The releases of a gateway, as they were at the last tick."""

    def __init__(self, store: Store, metrics: Metrics, log: FilteringBoundLogger) -> None:
        self.book = ReleaseBook(store)
        self._metrics = metrics
        self._log = log
        self._outcomes: dict[str, list[tuple[str, Outcome]]] = defaultdict(list)
        self._releases: Mapping[str, Release] = {}
        self._states: dict[str, ReleaseState] = {}
        self._problems: dict[str, str] = {}
        self._ticking = asyncio.Lock()  # what was read first must not be taken for the newest

    async def read(self, releases: Mapping[str, Release]) -> dict[str, ReleaseState]:
        """The states of these releases. Raises StateError, and ConfigError if a version that serves, or is on
        trial, is not in the file.
        """
        found = {name: await self.book.read(name, release) for name, release in releases.items()}
        for name, release in releases.items():
            states.check(name, release, found[name])
        return found

    def configure(self, releases: Mapping[str, Release], found: dict[str, ReleaseState]) -> None:
        """Have these releases from now on, in the states that :meth:`read` found."""
        self._releases, self._states = releases, found
        self._show()

    def __contains__(self, name: str) -> bool:
        return name in self._releases

    def __getitem__(self, name: str) -> tuple[Release, ReleaseState]:
        return self._releases[name], self._states[name]

    def choose(self, context: RequestContext, name: str) -> Version:
        """The version that serves a request; fills in release, version and trial."""
        release, state = self[name]
        trial, candidate = state.trial, False
        if trial is not None:
            candidate = _place(context, trial) * 100 < trial.weight
            context.trial, context.candidate = trial.id, candidate
        context.release, context.version = name, state.version(candidate=candidate)
        return release.versions[context.version]

    def note(self, context: RequestContext) -> None:
        """A request has ended: remember how, if it was part of a trial and an upstream was to answer it."""
        if context.trial and context.targets:
            self._keep(context.release, context.trial, _outcome(context))

    def scored(self, release: str, version: str, ended_at: float, score: float) -> None:
        """A client has judged an answer that ended then: it counts if its version was on trial by then."""
        if release not in self:
            return
        trial = self._states[release].trial
        if trial is not None and ended_at >= trial.started_at and version in (trial.stable, trial.candidate):
            self._keep(release, trial.id, Outcome(version == trial.candidate, score=score))

    def _keep(self, release: str, trial: str, outcome: Outcome) -> None:
        kept = self._outcomes[release]
        if len(kept) < _MOST_KEPT:
            kept.append((trial, outcome))

    async def keep_deciding(self) -> None:
        """Learn and decide for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Hand in what was learned, act on it, and see what others have done."""
        async with self._ticking:
            releases, found = self._releases, self._states
            for name, release in releases.items():
                try:
                    found[name] = await self._tick(name, release)
                except (
                    StateError,
                    ConfigError,
                ) as error:  # it stays as it was; outcomes wait for the next time
                    if self._problems.get(name) != str(error):
                        self._log.error("release cannot be read or changed", release=name, error=str(error))
                    self._problems[name] = str(error)
                else:
                    self._problems.pop(name, None)
            self._show()

    async def _tick(self, name: str, release: Release) -> ReleaseState:
        state = await self.book.read(name, release)
        states.check(name, release, state)
        outcomes = self._outcomes.pop(name, [])
        if state.trial is None or not (outcomes or states.is_due(release, state.trial, time.time())):
            return state

        def learn(state: ReleaseState, now: float) -> Event | None:
            trial = state.trial
            if trial is None:
                return None
            states.learn(trial, (outcome for of, outcome in outcomes if of == trial.id), release.canary)
            return states.decide(name, release, state, now=now)

        try:
            state, event = await self.book.change(name, release, learn)
        except BaseException:
            self._outcomes[name][:0] = outcomes
            raise
        if event is not None:
            self._log.warning(
                "release", release=name, what=event.what, version=event.version, detail=event.detail
            )
        return state

    def _show(self) -> None:
        weights = self._metrics.release_weight
        weights.clear()
        for name, release in self._releases.items():
            state = self._states[name]
            given = 0.0 if state.trial is None else state.trial.weight
            for version in release.versions:
                candidate = state.trial is not None and version == state.trial.candidate
                share = given if candidate else 100 - given if version == state.stable else 0.0
                weights.labels(name, version).set(share)


def _outcome(context: RequestContext) -> Outcome:
    now, candidate, first = time.monotonic(), context.candidate, context.first_token_at
    e2e_s, ttft_s = now - context.began, None if first is None else first - context.began
    if context.outcome == "cancelled":
        return Outcome(candidate, ttft_s=e2e_s if context.stream and first is None else None, e2e_s=e2e_s)
    if context.outcome != "ok":
        return Outcome(candidate, failed=True)
    tokens = context.usage.completion if context.usage is not None else 0
    tpot_s = (now - first) / (tokens - 1) if first is not None and tokens > 1 else None
    return Outcome(candidate, False, ttft_s, tpot_s, e2e_s)


def _place(context: RequestContext, trial: Trial) -> float:
    """Where in [0, 1) a request falls. Equal keys fall on the same place for as long as the trial lasts.

    An A/B test falls back on the API key. A canary does not: a small team's few keys would be on one side.
    """
    key = context.headers.get(KEY_HEADER) or context.body.get("user")
    if not key and trial.kind == "ab":
        key = context.key
    if not isinstance(key, str) or not key:
        return random.random()
    text = f"{trial.id}\0{context.tenant}\0{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
