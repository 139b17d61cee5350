"""The terminal's view of a search: a line a trial, a moving bar where a person looks, tables at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.lab.bench.load import Load
from headrace.lab.bench.table import duration
from headrace.lab.bench.terminal import Bar, show_comparison
from headrace.lab.tune import outcome as told
from headrace.lab.tune.accuracy import Judged
from headrace.lab.tune.measurement import Trial
from headrace.lab.tune.outcome import Outcome
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import Config, changes

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.lab.bench.compare import Comparison

_SHOWN = 10  # trials of the final table


class TerminalView:
    """Progress on ``console`` (standard error); ``goal`` is what a trial's value is."""

    def __init__(self, console: Console, goal: str) -> None:
        self._console = console
        self._bar = Bar(console)
        self._goal = goal
        self._search: Search | None = None
        self._end: float | None = None
        self._label = ""

    def judged(self, judged: Judged) -> None:
        """One line."""
        self._say(str(judged))

    def begins(self, search: Search, budget_s: float | None, most: int | None) -> None:
        """What lies ahead."""
        self._search = search
        if budget_s is not None:
            self._end = time.monotonic() + budget_s - search.spent_s
        bounds = [] if budget_s is None else [f"{budget_s / 60:.3g} minutes"]
        bounds += [] if most is None else [f"{most} trials"]
        known = f", {len(search.trials)} tried before" if search.trials else ""
        names = ", ".join(dimension.name for dimension in search.dimensions)
        self._say(f"{search.size} configurations of {names}{known}; up to {' and '.join(bounds)}")

    def started(self, number: int, config: Config) -> None:
        """The bar's label."""
        assert self._search is not None
        self._label = f"#{number} {_cut(changes(self._search.dimensions, config))}"
        self._bar.show(0.0, self._label, "starting the server")

    def running(self, load: Load) -> None:
        """Redraw."""
        best = self._search.best if self._search is not None else None
        news = [] if best is None or best.measurement is None else [f"best {best.measurement.value:.4g}"]
        if self._end is not None:
            left_s = max(self._end - time.monotonic(), 0.0)
            news.append(f"{int(left_s // 60)}:{int(left_s % 60):02} left")
        self._bar.show(load.progress, self._label, " · ".join(news))

    def finished(self, trial: Trial, best: Trial | None) -> None:
        """One line of what came out."""
        self._bar.hide()
        assert self._search is not None
        name = changes(self._search.dimensions, trial.config)
        found = trial.measurement
        if found is None:
            self._say(f"#{trial.number} {name}: failed: {trial.error}")
            return
        parts = [f"{found.value:.4g} {self._goal}"]
        first = self._search.trials[0].measurement
        if trial.number and first is not None and first.value > 0:
            parts[0] += f" ({found.value / first.value - 1:+.0%})"
        if found.ttft_p95_ms is not None:
            parts.append(f"TTFT p95 {duration(found.ttft_p95_ms)}")
        if found.tpot_p50_ms is not None:
            parts.append(f"TPOT p50 {duration(found.tpot_p50_ms)}")
        if not found.whole:
            parts.append(f"ended after part {len(found.parts)}")
        if best is not None and best.number == trial.number and trial.number:
            parts.append("best so far")
        self._say(f"#{trial.number} {name}: {' · '.join(parts)}")

    def confirming(self, what: str) -> None:
        """One line, and the bar's label."""
        self._bar.hide()
        self._label = f"measured again: {what}"
        self._say(self._label)

    def close(self) -> None:
        """The bar is gone."""
        self._bar.hide()

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def show(outcome: Outcome, comparison: Comparison | None, console: Console) -> None:
    """The best trials, the effects, the comparison, and what came of it."""
    console.print(f"\n{outcome.about['model']} · {outcome.workload}", highlight=False, markup=False)
    rows = told.trial_rows(outcome)
    _table(console, told.trial_columns(outcome), rows[:_SHOWN], left=(1,))
    if len(rows) > _SHOWN:
        console.print(f"… and {len(rows) - _SHOWN} more in the report")
    effects = told.effect_rows(outcome)
    if effects:
        console.print("Effect of each choice against its switch's default (additive fit, ± standard error)")
        _table(console, told.effect_columns(outcome), effects, left=(0, 1))
    if comparison is not None:
        console.print("Defaults against best, measured again in turns")
        show_comparison(comparison, console)
    for sentence in told.notes(outcome):
        console.print(sentence, highlight=False, markup=False)
    console.print(told.headline(outcome), highlight=False, markup=False, style="bold")
    if outcome.chosen_why:
        console.print(outcome.chosen_why, highlight=False, markup=False)


def _table(console: Console, names: list[str], rows: list[list[str]], left: tuple[int, ...]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(names):
        shown.add_column(name, justify="left" if number in left else "right", overflow="fold")
    for cells in rows:
        shown.add_row(*map(escape, cells))
    console.print(shown)
