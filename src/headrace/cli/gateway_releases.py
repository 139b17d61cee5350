"""headrace gateway releases: list, start, promote, rollback and report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.gateway_shared import AsJson, Config, date, read, table, with_store
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from headrace.gateway.releases.book import ReleaseBook
    from headrace.gateway.releases.report import Report, Side
    from headrace.gateway.releases.settings import Release
    from headrace.gateway.releases.state import Event
    from headrace.gateway.store import Store

app = typer.Typer(
    no_args_is_help=True,
    help="Versions under one name: canaries, A/B tests, promotion and rollback. A running gateway follows.",
)
T = TypeVar("T")
Name = Annotated[str, typer.Argument(metavar="RELEASE", help="A release of CONFIG.")]


@app.command(name="list")
def list_releases(config: Config, as_json: AsJson = False) -> None:
    """Show all releases: what serves, and what is on trial."""
    settings = read(config)
    from headrace.gateway.releases.book import ReleaseBook
    from headrace.gateway.releases.report import summary

    async def summaries(store: Store) -> list[dict[str, Any]]:
        book = ReleaseBook(store)
        return [
            asdict(summary(name, release, await book.read(name, release)))
            for name, release in settings.releases.items()
        ]

    rows = with_store(settings, summaries)
    if as_json:
        _print_json(rows)
        return
    names = ("release", "stable", "previous", "trial", "candidate", "weight", "versions")
    table(names, [tuple(_cell(row[name]) for name in names) for row in rows])


@app.command()
def start(
    config: Config,
    release: Name,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="The candidate.")],
    ab: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=99.9,
            metavar="PERCENT",
            help="An A/B test with this share for VERSION; not a canary.",
        ),
    ] = None,
) -> None:
    """Give VERSION a share of the requests: a canary that decides by itself, or an A/B test that does not."""
    event = _with_book(config, release, lambda book, settings: book.start(release, settings, version, ab))
    print(f"{release}: {version}: {event.what}, {event.detail}")


@app.command()
def promote(
    config: Config,
    release: Name,
    version: Annotated[str | None, typer.Option(help="Not the candidate, but this version.")] = None,
) -> None:
    """Give the candidate all requests at once and end its trial."""
    event = _with_book(config, release, lambda book, settings: book.promote(release, settings, version))
    print(f"{release}: {event.version} serves all requests")


@app.command()
def rollback(config: Config, release: Name) -> None:
    """End the trial for the stable version; without a trial, go back to the version before this one."""

    async def work(book: ReleaseBook, settings: Release) -> tuple[Event, str]:
        return await book.roll_back(release, settings), (await book.read(release, settings)).stable

    event, stable = _with_book(config, release, work)
    print(f"{release}: {event.version} is rolled back; {stable} serves all requests")


@app.command()
def report(config: Config, release: Name, as_json: AsJson = False) -> None:
    """Compare the versions of the trial, or of the last one, and say how sure the differences are."""
    from headrace.gateway.releases.report import report as made

    async def work(book: ReleaseBook, settings: Release) -> Report:
        return made(release, settings, await book.read(release, settings), await book.history(release))

    found = _with_book(config, release, work)
    if as_json:
        _print_json(asdict(found))
        return
    _show(found)


def _show(found: Report) -> None:
    trial = "nothing was tried yet"
    if found.started_at is not None:
        ended = "under way" if found.ended_at is None else f"ended {date(found.ended_at)}, {found.verdict}"
        trial = f"{found.kind} since {date(found.started_at)}, {ended}"
    print(f"{found.release}: {found.stable} is stable; {trial}")
    if found.sides:
        stable, candidate = found.sides
        print()
        tests = {test.measure: test for test in found.tests}
        rows = [
            (
                what,
                _show_number(getattr(stable, field)),
                _show_number(getattr(candidate, field)),
                f"{tests[measure].p_worse:.3g}" if measure else "-",
                f"{tests[measure].p_differs:.3g}" if measure else "-",
            )
            for what, field, measure in _lines(found)
        ]
        table(("", _title(stable), _title(candidate), "p worse", "p differs"), rows)
    if found.history:
        print()
        rows_of_history = [(date(e.at), e.what, e.version, e.detail) for e in found.history]
        table(("when", "what", "version", "why"), rows_of_history)


def _lines(found: Report) -> list[tuple[str, str, str]]:
    """Label, field of a side, and the measure whose test belongs to it."""
    percentile = f"p{found.percentile:g}"
    lines = [("requests", "requests", ""), ("failed", "failed", "failed")]
    for measure in ("ttft", "tpot", "e2e"):
        lines.append((f"{measure.upper()} {percentile} (s)", f"{measure}_s", measure))
        lines.append((f"{measure.upper()} p50 (s)", f"median_{measure}_s", ""))
    return [*lines, ("scores", "scores", ""), ("mean score", "score", "score")]


def _title(side: Side) -> str:
    return f"{side.version} ({side.weight:g}%)"


def _show_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _with_book(config: Path, name: str, work: Callable[[ReleaseBook, Release], Awaitable[T]]) -> T:
    settings = read(config)
    from headrace.gateway.releases.book import ReleaseBook

    release = settings.releases.get(name)
    if release is None:
        known = ", ".join(settings.releases) or "none"
        raise ConfigError(f"{config} has no release {name}; it has: {known}")
    return with_store(settings, lambda store: work(ReleaseBook(store), release))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
