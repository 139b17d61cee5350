"""The search as one page that needs nothing beside it, and as a picture."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headrace.lab.bench import table
from headrace.lab.bench.compare import Comparison, compare
from headrace.lab.bench.report import render
from headrace.lab.bench.result import ResultError, read
from headrace.lab.tune import outcome as told
from headrace.lab.tune.outcome import Outcome
from headrace.lab.tune.plot import picture

_NOT_SHOWN = {"switches", "limits"}


def write_report(outcome: Outcome, folder: Path) -> None:
    """Write report.html and pareto.png into ``folder``, with the comparison that lies there if any."""
    comparison = comparison_in(folder) if outcome.confirmed is not None else None
    page = render(
        resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8"),
        picture(outcome, "svg"),
        outcome=outcome,
        headline=told.headline(outcome),
        notes=told.notes(outcome),
        effect_columns=told.effect_columns(outcome),
        effects=told.effect_rows(outcome),
        comparison_columns=table.COMPARISON_COLUMNS,
        comparison=[table.comparison_row(d) for d in comparison.differences] if comparison else [],
        trial_columns=told.trial_columns(outcome),
        trials=told.trial_rows(outcome),
        about={name: value for name, value in outcome.about.items() if value and name not in _NOT_SHOWN},
    )
    (folder / "report.html").write_text(page, "utf-8")
    (folder / "pareto.png").write_bytes(picture(outcome, "png"))


def comparison_in(folder: Path) -> Comparison | None:
    """Of defaults.json with best.json; None if they say nothing."""
    try:
        return compare(read(folder / "defaults.json"), read(folder / "best.json"))
    except ResultError:
        return None
