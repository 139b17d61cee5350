"""The waterfall: what each step takes off the cost and off the latency."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.journey.results import COST_TARGET, LATENCY_TARGET, Journey, StepResult
from headrace.lab.bench.png import few_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#22282d", "#5b656d", "#e4e8eb"
_WHOLE, _LESS, _MORE, _TARGET = "#4a5560", "#1769aa", "#d9822b", "#8e2f8a"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#8a939b",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "axes.titlepad": 12,
    "svg.fonttype": "path",
}


def picture(journey: Journey, form: str) -> bytes:
    """As ``png`` or ``svg``: a waterfall of the cost over one of the latency, on logarithmic scales, so that
    bars of one height are one factor."""
    import matplotlib
    from matplotlib.figure import Figure

    steps = journey.measured()
    with matplotlib.rc_context(_STYLE):
        width = max(8.0, 2.1 * (len(steps) + 1))
        figure = Figure(figsize=(width, 9.2), dpi=110, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.2, h_pad=0.2, hspace=0.08)  # type: ignore[union-attr, call-arg]
        context = journey.context
        figure.suptitle(
            f"{journey.model}, step by step, on {context.cpu}, {context.cores} cores "
            "(logarithmic heights: equal bars are equal factors)",
            fontsize=14,
            color=_INK,
            x=0.02,
            ha="left",
        )
        axes: Any = figure.subplots(2, 1)
        _waterfall(
            axes[0],
            steps,
            [step.dollars_per_million for step in steps],
            f"Cost of a million output tokens at full load ({journey.users} users)",
            1 - COST_TARGET,
            f"target: −{COST_TARGET:.0%}",
            lambda value: f"${value:,.2f}",
        )
        _waterfall(
            axes[1],
            steps,
            [step.e2e_ms for step in steps],
            f"End-to-end latency of a request, median, at equal load ({journey.rate or 0:g} requests/s)",
            1 / LATENCY_TARGET,
            f"target: {LATENCY_TARGET:g} times lower",
            _duration,
        )
        out = io.BytesIO()
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return few_colours(out.getvalue()) if form == "png" else out.getvalue()


def _waterfall(
    axis: Axes,
    steps: Sequence[StepResult],
    values: Sequence[float | None],
    title: str,
    target: float,
    target_text: str,
    written: Any,
) -> None:
    axis.set_title(title)
    shown = [(step, value) for step, value in zip(steps, values, strict=True) if value]
    if not shown:
        axis.text(0.5, 0.5, "nothing was measured", ha="center", color=_MUTED, transform=axis.transAxes)
        axis.set_axis_off()
        return
    numbers = [value for _, value in shown]
    first, last = numbers[0], numbers[-1]
    goal = first * target
    floor = min(*numbers, goal) * 0.55
    axis.set_yscale("log")
    axis.set_ylim(floor, max(numbers) * 1.9)
    before = first
    for place, (_, value) in enumerate(shown):
        whole = place == 0
        low, high = (floor, value) if whole else sorted((before, value))
        colour = _WHOLE if whole else _LESS if value <= before else _MORE
        axis.bar(place, high - low, bottom=low, width=0.62, color=colour, lw=0, zorder=3)
        if not whole:
            axis.plot((place - 1 + 0.31, place + 0.31), (before, before), color=_MUTED, lw=1, zorder=2)
        text = written(value) if whole else f"{_change(before, value)}\n{written(value)}"
        _label(axis, place, high, text, bold=whole)
        before = value
    if len(shown) > 1:
        end = len(shown)
        axis.plot((end - 1 - 0.31, end + 0.31), (last, last), color=_MUTED, lw=1, zorder=2)
        axis.bar(end, last - floor, bottom=floor, width=0.62, color=_WHOLE, lw=0, zorder=3)
        _label(axis, end, last, f"{_total(first, last)}\n{written(last)}", bold=True)
        axis.axhline(goal, color=_TARGET, lw=1.4, ls=(0, (5, 3)), zorder=1)
        axis.annotate(
            f"{target_text}\n{written(goal)}",
            (end + 0.42, goal),
            va="center",
            color=_TARGET,
            fontsize=10.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
            zorder=4,
        )
    names = [textwrap.fill(step.name, 12) for step, _ in shown]
    names += ["all together"] if len(shown) > 1 else []
    axis.set_xticks(range(len(names)), names, color=_INK)
    axis.tick_params(axis="both", length=0)
    axis.set_yticks([])
    axis.minorticks_off()
    axis.set_xlim(-0.5, len(names) + 0.3)


def _label(axis: Axes, place: float, top: float, text: str, *, bold: bool) -> None:
    axis.annotate(
        text,
        (place, top),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=10.5,
        color=_INK,
        fontweight="bold" if bold else "normal",
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _change(before: float, after: float) -> str:
    share = after / before - 1
    if abs(share) < 0.005:
        return "±0%"
    return f"{share:+.0%}".replace("-", "−")


def _total(first: float, last: float) -> str:
    return f"{first / last:.1f}× lower" if last < first else f"{last / first:.1f}× higher"


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
