"""A measurement as one picture of five panels."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.lab.bench.png import few_colours
from headrace.lab.bench.result import Result
from headrace.lab.bench.slices import token_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headrace.lab.bench.metrics import StageResult

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a939b",
    "axes.labelcolor": "#333a40",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "xtick.color": "#555e66",
    "ytick.color": "#555e66",
    "axes.grid": True,
    "grid.color": "#e4e8eb",
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "svg.fonttype": "path",
}
_WIDE = 5  # from here on times are drawn on a log scale
BLUE, ORANGE, GREY, RED = "#1769aa", "#e07a1f", "#8a939b", "#c0392b"


def picture(result: Result, form: str) -> bytes:
    """As ``png`` or ``svg``: latency against throughput, the Pareto front, TTFT and TPOT, a timeline."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 12), dpi=100, layout="constrained", facecolor="white")
        _fill(figure, result)
        out = io.BytesIO()
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return few_colours(out.getvalue()) if form == "png" else out.getvalue()


def _fill(figure: Figure, result: Result) -> None:
    context, created = result.context, result.created[:16].replace("T", " ")
    figure.suptitle(
        f"{result.endpoint.model}: {result.workload.description}\n"
        f"{context.machine} · {context.cpu} · {context.cores} cores · {created} UTC",
        fontsize=12.5,
        color="#22282d",
    )
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15, hspace=0.06, wspace=0.04)  # type: ignore[union-attr, call-arg]
    axes: Any = figure.subplot_mosaic(
        [["latency", "front"], ["ttft", "tpot"], ["time", "time"]], height_ratios=(1, 1, 0.75)
    )
    stages = [stage for stage in result.stages if stage.completed]
    colours = _colours(len(stages))
    _latency_throughput(axes["latency"], stages, result.knee)
    _pareto(axes["front"], stages)
    limits = result.slo
    _distribution(
        axes["ttft"], stages, colours, "ttft_s", "Time to first token", limits.ttft_ms if limits else None
    )
    _distribution(
        axes["tpot"], stages, colours, "tpot_s", "Time per output token", limits.tpot_ms if limits else None
    )
    _timeline(axes["time"], stages[-1] if stages else None)


def _colours(count: int) -> list[Any]:
    import matplotlib

    shades = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.82, count))
    return list(shades)


def _latency_throughput(axis: Axes, stages: list[StageResult], knee: str | None) -> None:
    axis.set_title("Latency against throughput")
    axis.set_xlabel("output tokens per second")
    axis.set_ylabel("end-to-end latency, s")
    shown = sorted((s for s in stages if s.e2e), key=lambda s: s.level)
    if not shown:
        _nothing(axis)
        return
    x = [s.output_throughput.value for s in shown]
    for name, colour, marker in (("p50", BLUE, "o"), ("p95", ORANGE, "s")):
        y = [getattr(s.e2e, name) / 1000 for s in shown]
        low, high = zip(*(_ci(s, name) for s in shown), strict=True)
        bars = [np.maximum(np.subtract(y, low), 0), np.maximum(np.subtract(high, y), 0)]
        axis.errorbar(
            x, y, yerr=bars, color=colour, marker=marker, markersize=6, capsize=3, lw=1.6, label=name
        )
    for stage, at in zip(shown, x, strict=True):
        text = f"{stage.label.removesuffix(' poisson')}{'  (knee)' if stage.label == knee else ''}"
        top = max(stage.e2e.p95 / 1000 if stage.e2e else 0.0, _ci(stage, "p95")[1])
        _name(axis, text, (at, top))
    axis.margins(x=0.14, y=0.18)
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _pareto(axis: Axes, stages: list[StageResult]) -> None:
    """Speed of one answer against tokens of all: the stages that no other beats in both are the front."""
    axis.set_title("Pareto front: speed for one, throughput for all")
    axis.set_xlabel("tokens per second of one answer (1 / TPOT p50)")
    axis.set_ylabel("output tokens per second in all")
    points = [(1000 / s.tpot.p50, s.output_throughput.value, s) for s in stages if s.tpot and s.tpot.p50 > 0]
    if not points:
        _nothing(axis)
        return
    front = [p for p in points if not any(q[0] >= p[0] and q[1] >= p[1] and q is not p for q in points)]
    front.sort(key=lambda point: point[0])
    axis.plot([x for x, _, _ in front], [y for _, y, _ in front], color=BLUE, lw=1.6, zorder=2)
    for point in points:
        x, y, stage = point
        best = point in front
        axis.plot(x, y, "o", color=BLUE, markerfacecolor=BLUE if best else "white", markersize=7, zorder=3)
        _name(axis, stage.label.removesuffix(" poisson"), (x, y), "right" if best else "left")
    beaten = len(points) - len(front)
    if beaten:
        axis.plot([], [], "o", color=BLUE, markerfacecolor="white", markersize=7, label="beaten in both")
        axis.legend(loc="best")
    axis.margins(x=0.14, y=0.18)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)


def _name(
    axis: Axes, text: str, at: tuple[float, float], side: Literal["above", "left", "right"] = "above"
) -> None:
    """A label beside a point: above it, to the left and below, to the right and above."""
    offset, align = {"above": ((0, 7), "center"), "left": ((-6, -13), "right"), "right": ((6, 4), "left")}[
        side
    ]
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
    axis.annotate(
        text, at, xytext=offset, textcoords="offset points", ha=align, fontsize=9, bbox=box, zorder=4
    )


def _ci(stage: StageResult, name: str) -> tuple[float, float]:
    assert stage.e2e is not None
    low, high = stage.e2e.ci.get(name, (getattr(stage.e2e, name),) * 2)
    return low / 1000, high / 1000


def _distribution(
    axis: Axes, stages: list[StageResult], colours: list[Any], value: str, title: str, limit_ms: float | None
) -> None:
    axis.set_title(title)
    axis.set_xlabel("milliseconds")
    axis.set_ylabel("share of requests at or below, %")
    drawn = False
    for stage, colour in zip(stages, colours, strict=True):
        times = [getattr(record, value) for record in stage.records if record.counts and record.ok]
        times = sorted(time * 1000 for time in times if time is not None and time > 0)
        if times:
            drawn = True
            shares = np.arange(1, len(times) + 1) / len(times) * 100
            axis.step([times[0], *times], [0, *shares], where="post", color=colour, lw=1.9, label=stage.label)
    if not drawn:
        _nothing(axis)
        return
    low, high = axis.dataLim.intervalx
    if high > _WIDE * low:
        axis.set_xscale("log")
        axis.set_xlabel("milliseconds (log scale)")
        _plain_ticks(axis)
    else:
        shown = high if limit_ms is None or limit_ms > 3 * high else max(high, limit_ms)
        axis.set_xlim(0, shown * 1.08)
    axis.set_ylim(0, 101)
    if limit_ms is not None:
        axis.axvline(limit_ms, color=RED, lw=1.3, ls="--", label=f"SLO {limit_ms:g} ms")
    axis.legend(loc="best")


def _plain_ticks(axis: Axes) -> None:
    """Numbers as people write them, also where less than a decade is shown."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_xlim()
    wide = high / low > 30
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if wide else (1, 1.5, 2, 3, 5, 7)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _timeline(axis: Axes, stage: StageResult | None) -> None:
    axis.set_xlabel("seconds since the stage began")
    if stage is None:
        axis.set_title("Timeline")
        _nothing(axis)
        return
    axis.set_title(f"Timeline of {stage.label}")
    begin, end = stage.window_begin_s, stage.window_begin_s + stage.window_s
    last = max([end, *(record.end_s for record in stage.records)])
    bounds = np.linspace(0, last, int(np.clip(last * 2, 10, 160)) + 1)
    middles = (bounds[:-1] + bounds[1:]) / 2
    axis.axvspan(begin, min(end, last), color="#eef4f9", lw=0, label="measured window")
    axis.fill_between(middles, token_rates(stage.records, bounds), color=BLUE, alpha=0.25, lw=0, step="mid")
    axis.step(middles, token_rates(stage.records, bounds), where="mid", color=BLUE, lw=1.6, label="tokens/s")
    axis.set_ylabel("output tokens per second")
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, last)
    under_way = [sum(r.scheduled_s <= at < r.end_s for r in stage.records) for at in middles]
    right = axis.twinx()
    right.step(middles, under_way, where="mid", color=ORANGE, lw=1.4, label="requests under way")
    failures = [record.end_s for record in stage.records if record.counts and not record.ok]
    if failures:
        right.plot(failures, [0] * len(failures), "x", color=RED, label="failed", clip_on=False)
    right.set_ylabel("requests under way")
    right.set_ylim(0, max([*under_way, 1]) * 1.35)
    right.grid(False)
    right.spines["right"].set_visible(True)
    handles, labels = (
        left + both
        for left, both in zip(*(a.get_legend_handles_labels() for a in (axis, right)), strict=True)
    )
    right.legend(handles, labels, loc="upper center", ncols=len(labels))
    axis.set_ylim(0, axis.get_ylim()[1] * 1.2)


def _nothing(axis: Axes) -> None:
    axis.text(
        0.5, 0.5, "nothing was measured", ha="center", va="center", color=GREY, transform=axis.transAxes
    )
    axis.set_xticks([])
    axis.set_yticks([])
