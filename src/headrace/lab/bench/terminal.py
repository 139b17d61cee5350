"""The terminal's view: live while it runs, a table when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lab.bench import table
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import StageResult

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.lab.bench.compare import Comparison
    from headrace.lab.bench.result import Result

_COLOURS = {"better": "green", "worse": "red", "no evidence": "dim"}


class Bar:
    """A moving bar on ``console`` where a person looks; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._seen = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[news]}", style="dim"),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=1.0, label="", news="", visible=False)

    def show(self, completed: float, label: str, news: str) -> None:
        """Redraw. ``completed``: from 0 to 1."""
        if self._seen:
            self._progress.start()
            self._progress.update(self._task, completed=completed, label=label, news=news, visible=True)
            self._progress.refresh()

    def hide(self) -> None:
        """It is gone until it is shown again."""
        if self._seen:
            self._progress.update(self._task, visible=False)
            self._progress.stop()


class TerminalView:
    """Progress on ``console`` (standard error): a moving bar where a person looks, one line a stage else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(console)

    def running(self, load: Load) -> None:
        """Redraw."""
        failed = f" · {load.failed} failed" if load.failed else ""
        phase = "warming up · " if load.now() < load.begin_s else ""
        news = f"{phase}{load.in_flight} under way · {load.done} done{failed}"
        self._bar.show(load.progress, load.stage.label, news)

    def finished(self, result: StageResult) -> None:
        """One line of what came out."""
        self._bar.hide()
        cells = dict(zip(table.COLUMNS, table.row(result), strict=True))
        failed = f" · {cells['failed']} failed" if cells["failed"] != "0" else ""
        self._console.print(
            f"{cells['load']}: {cells['out tok/s']} tok/s · TTFT p50 {cells['TTFT p50']} · "
            f"TPOT p50 {cells['TPOT p50']} · {cells['requests']} requests{failed}",
            highlight=False,
        )


def show(result: Result, console: Console) -> None:
    """The final table and what there is to say about it."""
    from rich import box
    from rich.table import Table

    names = table.columns(result)
    # Narrow terminals do without what the report has anyway.
    dropped = set() if console.width >= 150 else {"TTFT p99", "TPOT p95", "ITL p99", "requests"}
    kept = [number for number, name in enumerate(names) if name not in dropped]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for number in kept:
        shown.add_column(names[number], justify="left" if number == 0 else "right", overflow="fold")
    for cells in table.rows(result):
        shown.add_row(*(cells[number] for number in kept))
    console.print(f"\n[bold]{result.endpoint.model}[/bold] · {result.workload.description}", highlight=False)
    console.print(
        f"{result.context.machine} · {result.context.cpu} · {result.context.cores} cores", highlight=False
    )
    console.print(shown)
    if result.stages:
        last = result.stages[-1]
        if server := table.server_line(last):
            console.print(f"server at {last.label}: {server}", highlight=False, markup=False)
        console.print(f"client at {last.label}: {table.client_line(last)}", highlight=False, markup=False)
    if floor := table.floor_line(result):
        console.print(floor, highlight=False, markup=False)
    for sentence in table.findings(result):
        console.print(sentence, highlight=False, markup=False)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Every metric of every common stage, then the verdict."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in table.COMPARISON_COLUMNS:
        shown.add_column(name, justify="left" if name in ("load", "metric", "verdict") else "right")
    for difference in comparison.differences:
        *cells, verdict = table.comparison_row(difference)
        shown.add_row(*cells, f"[{_COLOURS[difference.verdict]}]{verdict}[/]")
    console.print(shown)
    for note in comparison.notes:
        console.print(note, highlight=False, markup=False)
    console.print(f"verdict: [bold {_COLOURS[comparison.verdict]}]{comparison.verdict}[/]")
