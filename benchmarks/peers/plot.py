"""The report as a picture: one panel for each workload, one bar for each engine and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from catalogue import OURS
from results import Report, lower_is_better, main_value

_SHADES = {4: 1.0, 8: 0.65, 16: 0.35}
_OURS, _PEERS = "#1769aa", "#8a939b"


def write_plot(report: Report, path: Path) -> None:
    """Write ``path`` (.png), unless nothing was measured."""
    import matplotlib
    from matplotlib.figure import Figure

    keys = [key for key in report.titles if any(key in row.workloads for row in report.rows)]
    if not keys:
        return
    rows = -(-len(keys) // 2)
    tallest = max(sum(key in row.workloads for row in report.rows) for key in keys)
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"}):
        figure = Figure(figsize=(13, rows * (1.1 + 0.24 * tallest) + 0.8), dpi=110, layout="constrained")
        figure.suptitle(
            f"{report.model} on {report.machine['cpu']}, {report.threads} threads\n"
            "dark: 4 bits, middle: 8, light: 16; lines: lowest and highest; %: of the machine's limit"
        )
        axes = figure.subplots(rows, 2, squeeze=False).flatten()
        for axis, key in zip(axes, keys, strict=False):
            _panel(axis, report, key)
        for axis in axes[len(keys) :]:
            axis.set_visible(False)
        figure.savefig(path)


def _panel(axis: Any, report: Report, key: str) -> None:
    rows = [row for row in report.rows if key in row.workloads]
    name = main_value(rows[0].workloads[key])[0]
    rows.sort(key=lambda row: main_value(row.workloads[key])[1].median, reverse=lower_is_better(name))
    for place, row in enumerate(rows):
        found = row.workloads[key]
        value = main_value(found)[1]
        colour = _OURS if row.engine == OURS else _PEERS
        spread = [[value.median - value.low], [value.high - value.median]]
        axis.barh(place, value.median, color=colour, alpha=_SHADES[row.bits], xerr=spread, ecolor="#333a40")
        share = "" if found.share is None else f"  {found.share:.0%}"
        axis.text(
            value.high,
            place,
            f"  {value.median:{'.0f' if value.median >= 100 else '.3g'}}{share}",
            va="center",
        )
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.set_title(f"{key}: {report.titles[key].split(',')[0]}", loc="left")
    axis.set_xlabel(f"{name} ({'lower' if lower_is_better(name) else 'higher'} is better)")
    axis.margins(x=0.16)
    axis.spines[["top", "right"]].set_visible(False)
