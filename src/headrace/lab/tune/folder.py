"""The output folder: what a search depends on, its storage, and what it leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from headrace.errors import ConfigError
from headrace.lab.tune.measurement import Trial
from headrace.lab.tune.outcome import SCHEMA, Outcome, headline, in_words

_OURS = ("search.json", "study.db", "trials.json", "best.yaml", "pareto.png", "report.html",
         "defaults.json", "best.json")  # fmt: skip


class Folder:
    """One search's files, for one program at a time; close it, or use it as a context.

    Raises ConfigError if the folder holds another search, or something else, or is in use.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self.storage = path / "study.db"
        self._about = path / "search.json"
        self._lock = FileLock(path / ".lock", timeout=0)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            if overwrite:
                self._clear()
            self._claim(about)
        except Timeout:
            raise ConfigError(f"another headrace tune is at work in {path}: wait for it, or end it") from None
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _clear(self) -> None:
        for name in _OURS:
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("accuracy-*.json"):
            file.unlink()

    def _claim(self, about: dict[str, Any]) -> None:
        about = json.loads(json.dumps(about))
        if not self._about.exists():
            if any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise ConfigError(
                    f"{self.path} holds other files: name an empty or a new folder with --output"
                )
            _replace(self._about, (json.dumps({"schema": SCHEMA} | about, indent=1) + "\n").encode())
            return
        try:
            found = json.loads(self._about.read_text("utf-8"))
            same_kind = isinstance(found, dict) and found.pop("schema", None) == SCHEMA
        except ValueError:
            same_kind = False
        if not same_kind:
            raise ConfigError(
                f"{self._about} describes no search of headrace tune; remove it, or --overwrite"
            )
        if differing := [name for name in sorted({*found, *about}) if found.get(name) != about.get(name)]:
            told = "; ".join(f"{n}: {_short(found.get(n))}, now {_short(about.get(n))}" for n in differing)
            raise ConfigError(
                f"{self.path} holds another search ({told}): name another folder with --output, or give "
                "--overwrite"
            )

    def earlier(self) -> Outcome | None:
        """What an earlier run wrote, if it can be read."""
        try:
            return msgspec.json.decode((self.path / "trials.json").read_bytes(), type=Outcome)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, outcome: Outcome) -> None:
        """trials.json, best.yaml, pareto.png and report.html."""
        from headrace.lab.tune.report import write_report

        text = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
        _replace(self.path / "trials.json", text + b"\n")
        if outcome.best is not None:
            _replace(self.path / "best.yaml", best_yaml(outcome).encode())
            write_report(outcome, self.path)


def best_yaml(outcome: Outcome) -> str:
    """The chosen configuration as `headrace serve --config` takes it, with what was measured as comments."""
    import yaml

    best: Trial = next(trial for trial in outcome.trials if trial.number == outcome.best)
    lines = [
        f"headrace tune, {outcome.created[:16].replace('T', ' ')} UTC, headrace {outcome.context.headrace}",
        f"{outcome.context.machine}: {outcome.context.cpu}, {outcome.context.cores} cores",
        f"workload: {outcome.workload}" + (f"; SLO: {outcome.slo}" if outcome.slo else ""),
        f"trials: {len(outcome.trials)}",
        f"defaults: {in_words(outcome.trials[0])}",
        f"best trial: {in_words(best)}",
        headline(outcome),
        *([outcome.chosen_why] if outcome.chosen_why else []),
        *(str(judged) for judged in outcome.judged),
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    options = {"model": outcome.about["model"], **outcome.serve, **outcome.chosen}
    return comments + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)


def _replace(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
