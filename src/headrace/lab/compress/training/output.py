"""Where a student goes: a folder that appears when it is whole, and what is kept beside it until then."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.lab.compress.formats.publish import refuse_existing
from headrace.lab.compress.training.report import TrainingReport
from headrace.lab.compress.work import Work


class Output:
    """The folder ``path``. Raises ConfigError if it cannot come into being, or would hold one of ``sources``.

    ``partial``: the folder while it is not whole; ``work_path``: where checkpoints are.
    """

    def __init__(self, path: Path, sources: Sequence[Path]) -> None:
        if path.name in ("", ".."):
            raise ConfigError(f"--output {path}: name a folder that is to be made.")
        refuse_existing(path)
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"The folder of {path} does not exist.")
        for source in sources:
            if path.resolve() in (source.resolve(), *source.resolve().parents):
                raise ConfigError(f"{path} is or holds {source}: name another folder.")
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self.work_path = path.with_name(f".{path.name}.work")

    @contextmanager
    def work(self, about: dict[str, Any]) -> Iterator[Work]:
        """The folder of the unfinished training, removed if the block ends well; no half-written one is left.

        Raises ConfigError for a disk that is full or cannot be written.
        """
        try:
            with Work(self.work_path, about) as work:
                try:
                    yield work
                finally:
                    self.remove_partial()
                work.remove()
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise ConfigError(
                f"{self.path} cannot be written: {why}. What is finished is kept in {self.work_path.name}: "
                "the same command goes on from there."
            ) from None

    def remove_partial(self) -> None:
        """The folder that is not whole, and what a killed run left of the draft of one."""
        for path in self.partial.parent.glob(f"*{self.partial.name}*"):
            shutil.rmtree(path, ignore_errors=True)

    def place(self, report: TrainingReport) -> None:
        """Add the report, and put the folder where the user asked for it."""
        report.write(self.partial)
        if self.path.is_dir():
            self.path.rmdir()  # it is empty
        self.partial.rename(self.path)
