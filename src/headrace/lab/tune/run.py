"""A whole search in a folder: the gate, the trials, the winner against the defaults, the files."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import HeadraceError
from headrace.lab.bench.context import context
from headrace.lab.bench.load import Load
from headrace.lab.bench.result import write
from headrace.lab.tune.accuracy import AccuracyGate, Judged, passing
from headrace.lab.tune.confirm import PAIRS, Confirmed, confirmed, interleaved
from headrace.lab.tune.folder import Folder
from headrace.lab.tune.measurement import Trial
from headrace.lab.tune.outcome import Outcome
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import Config, Dimension, changes, default_config, serve_options
from headrace.lab.tune.trial import Measurer, Setup


class View(Protocol):
    """Somebody who watches a search."""

    def judged(self, judged: Judged) -> None:
        """The gate has looked at a choice."""

    def begins(self, search: Search, budget_s: float | None, most: int | None) -> None:
        """The trials begin, or go on."""

    def started(self, number: int, config: Config) -> None:
        """A trial begins."""

    def running(self, load: Load) -> None:
        """Called some times a second."""

    def finished(self, trial: Trial, best: Trial | None) -> None:
        """A trial is over."""

    def confirming(self, what: str) -> None:
        """A run of the final comparison begins."""


@dataclass(slots=True)
class Tuning:
    """``budget_s``: time of the whole search; ``most``: trials in all. At least one of them is given.
    ``serve``: the options that ``setup.fixed`` stands for, for best.yaml.
    """

    setup: Setup
    dimensions: Sequence[Dimension]
    gate: AccuracyGate
    folder: Folder
    about: dict[str, Any]
    serve: Mapping[str, Any]
    view: View
    budget_s: float | None
    most: int | None
    _judged: list[Judged] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        """Search and write the files; Ctrl-C ends it early with what there is.

        Raises HeadraceError if the defaults cannot be served or nothing is left to search, KeyboardInterrupt
        when there is nothing to show yet.
        """
        dimensions = passing(self.dimensions, self.gate, self._told)
        if not dimensions:
            refused = "; ".join(str(judged) for judged in self._judged if judged.failures)
            raise HeadraceError(f"there is nothing left to search: {refused}")
        measurer = Measurer(self.setup, dimensions, self.view)
        search = Search(
            dimensions,
            measurer,
            self.view,
            storage=self.folder.storage,
            seed=self.setup.plan.seed,
        )
        earlier = self.folder.earlier()
        known = len(search.trials)
        left_s = None if self.budget_s is None else self.budget_s - (time.monotonic() - self._began)
        self.view.begins(search, left_s, self.most)
        interrupted = False
        again = None
        try:
            search.run(left_s, self.most, afterwards=2 * PAIRS)
            if earlier is not None and len(search.trials) == known:
                again = earlier.confirmed
            again = again or self._confirm(search, measurer)
        except KeyboardInterrupt:
            interrupted = True
            if search.best is None:
                raise
        workload = measurer.workload or ("" if earlier is None else earlier.workload)
        outcome = self._outcome(search, again, interrupted, workload)
        self.folder.write(outcome)
        return outcome

    def _told(self, judged: Judged) -> None:
        self._judged.append(judged)
        self.view.judged(judged)

    def _confirm(self, search: Search, measurer: Measurer) -> Confirmed | None:
        """The best trial against the defaults; None if they are the same."""
        defaults = default_config(search.dimensions)
        if search.best is None or search.best.config == defaults:
            return None
        before, after = interleaved(search.best.config, defaults, measurer.result, self.view.confirming)
        for result, name in ((before, "defaults"), (after, "best")):
            write(result, self.folder.path / f"{name}.json")
        return confirmed(search.best.config, before, after)

    def _outcome(self, search: Search, again: Confirmed | None, interrupted: bool, workload: str) -> Outcome:
        best = search.best
        chosen, why = _choice(search, again)
        return Outcome(
            created=datetime.datetime.now(datetime.UTC).isoformat(),
            about=self.about,
            context=context(),
            workload=workload,
            slo=None if self.setup.plan.slo is None else str(self.setup.plan.slo),
            goal=self.setup.goal,
            switches={d.name: [choice.label for choice in d.choices] for d in search.dimensions},
            serve=dict(self.serve),
            judged=self._judged,
            trials=search.trials,
            best=None if best is None else best.number,
            confirmed=again,
            chosen=chosen,
            chosen_why=why,
            interrupted=interrupted,
            seconds=round(time.monotonic() - self._began, 1),
        )


def _choice(search: Search, again: Confirmed | None) -> tuple[dict[str, Any], str]:
    """The serve options of best.yaml: the winner's, unless measuring again did not bear it out."""
    best = search.best
    if best is None or best.config == default_config(search.dimensions):
        return {}, ""
    options = serve_options(search.dimensions, best.config)
    if again is None:
        return options, "best.yaml has the best trial's options; they were not measured again"
    if again.better or again.gain is None:
        return options, ""
    name = changes(search.dimensions, best.config)
    return {}, f"best.yaml keeps the defaults: {name} may be chance"
