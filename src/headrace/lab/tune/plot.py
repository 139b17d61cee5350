"""The search as a picture: throughput against latency, and the front that nothing beats in both."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.lab.bench.plots import BLUE, GREY, ORANGE, RED, STYLE
from headrace.lab.tune.measurement import Measurement, Trial
from headrace.lab.tune.outcome import Outcome
from headrace.lab.tune.switches import changes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    ("ttft_p95_ms", "ttft_ms", "time to first token, p95, ms"),
    ("tpot_p95_ms", "tpot_ms", "time per output token, p95, ms"),
)
_NAMED = 10  # configurations of the front that the legend spells out


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Of (throughput, latency) the ones that no other beats in both, by rising throughput."""
    found: list[int] = []
    lowest = float("inf")
    for at in sorted(range(len(points)), key=lambda k: (-points[k][0], points[k][1])):
        if points[at][1] < lowest:
            lowest = points[at][1]
            found.append(at)
    return found[::-1]


def picture(outcome: Outcome, form: str) -> bytes:
    """As ``png`` or ``svg``."""
    import matplotlib
    from matplotlib.figure import Figure

    measured = [(t, t.measurement) for t in outcome.trials if t.measurement is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 7.4), dpi=110, facecolor="white")
        figure.suptitle(
            f"{outcome.about['model']}: {len(outcome.trials)} configurations tried\n{outcome.workload}",
            fontsize=12.5,
            color="#22282d",
            y=0.975,
        )
        named: set[int] = set()
        axes: Any = figure.subplots(1, 2)
        for axis, (latency, limit, label) in zip(axes, _PANELS, strict=True):
            named |= _panel(axis, outcome, measured, latency, label)
            _limit(axis, outcome, limit)
            axis.legend(loc="upper left", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")
        lines = _key(outcome, named)
        figure.subplots_adjust(
            left=0.06, right=0.985, top=0.86, bottom=0.11 + 0.0245 * len(lines), wspace=0.16
        )
        figure.text(0.06, 0.02, "\n".join(lines), fontsize=9, color="#333a40", va="bottom", linespacing=1.35)
        out = io.BytesIO()
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _panel(
    axis: Axes, outcome: Outcome, measured: list[tuple[Trial, Measurement]], latency: str, label: str
) -> set[int]:
    """Draws all trials; the numbers that it marks."""
    axis.set_xlabel("output tokens per second")
    axis.set_ylabel(label)
    axis.set_title(f"Throughput against {label.partition(',')[0]}")
    shown = [(trial, found, getattr(found, latency)) for trial, found in measured]
    shown = [(trial, found, ms) for trial, found, ms in shown if ms is not None]
    whole = [(trial, found.throughput, ms) for trial, found, ms in shown if found.whole]
    ended = [(found.throughput, ms) for _, found, ms in shown if not found.whole]
    if ended:
        axis.plot(*zip(*ended, strict=True), "x", color=GREY, ms=5, label="ended early")
    axis.plot([x for _, x, _ in whole], [y for *_, y in whole], "o", color=BLUE, ms=6, label="measured")
    best = [whole[k] for k in front([(x, y) for _, x, y in whole])]
    axis.plot(
        [x for _, x, _ in best], [y for *_, y in best], "-o", color=ORANGE, ms=8, lw=1.8,
        label="front: nothing is better in both",
    )  # fmt: skip
    default = next(((x, y) for trial, x, y in whole if trial.number == 0), None)
    if default is not None:
        axis.plot(*default, "D", color="white", mec=RED, mew=2, ms=9, label="#0 defaults")
    marked = {trial.number: (x, y) for trial, x, y in best}
    marked |= {trial.number: (x, y) for trial, x, y in whole if trial.number in (0, outcome.best)}
    for place, (number, at) in enumerate(sorted(marked.items(), key=lambda pair: pair[1])):
        axis.annotate(
            f"#{number}" + (" best" if number == outcome.best else ""),
            at,
            xytext=(0, 9 if place % 2 else -17),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            weight="bold" if number == outcome.best else "normal",
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
        )
    axis.margins(x=0.1, y=0.14)
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.22)
    return set(marked)


def _limit(axis: Axes, outcome: Outcome, name: str) -> None:
    limit = outcome.about.get("limits", {}).get(name)
    if limit is not None and limit < 4 * axis.get_ylim()[1]:
        axis.axhline(limit, color=RED, lw=1.3, ls="--", label=f"SLO {limit:g} ms")
        axis.set_ylim(top=max(axis.get_ylim()[1], limit * 1.1))


def _key(outcome: Outcome, named: set[int]) -> list[str]:
    """What the numbers stand for."""
    trials = {trial.number: trial for trial in outcome.trials}
    lines: list[str] = []
    for number in sorted(named)[:_NAMED]:
        text = f"#{number}  {changes(outcome.dimensions, trials[number].config)}"
        lines += textwrap.wrap(text, 165, subsequent_indent="      ")
    if len(named) > _NAMED:
        lines.append(f"… and {len(named) - _NAMED} more: see the table")
    return lines
