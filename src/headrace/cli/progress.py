"""Progress bars of downloads and of work in stages, on standard error and only where a person sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.model.store import Progress


@contextmanager
def download_progress() -> Iterator[Progress]:
    """A callback for the model store; its bar appears with the first bytes and is erased at the end.

    Costs no import of rich unless something is downloaded. Silent when standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    bars = _Bars()
    try:
        yield bars.update
    finally:
        bars.stop()


@contextmanager
def stage_progress() -> Iterator[Progress]:
    """A callback for work in stages: a bar for each, with the time that is left, on standard error.

    Silent when standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


class _Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.rich = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.tasks: dict[str, int] = {}

    def update(self, what: str, done: int, total: int) -> None:
        if not self.tasks:
            self.rich.start()
        if what not in self.tasks:
            self.tasks[what] = self.rich.add_task(what, total=total or None)
        self.rich.update(self.rich.task_ids[self.tasks[what]], completed=done, total=total or None)

    def stop(self) -> None:
        if self.tasks:
            self.rich.stop()
