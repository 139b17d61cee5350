"""What the gateway's commands share: their file, its store, and tables."""

from __future__ import annotations

import asyncio
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.store import Store

T = TypeVar("T")
Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The gateway's YAML file, or `default` if it was served without."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read(path: Path, served: Sequence[str] = ()) -> GatewayConfig:
    """The gateway's settings; ``served``: names of what is served in its own process.

    ``path`` may be the word that stands for the gateway without a file. Raises ConfigError.
    """
    from headrace.gateway.config import read_config
    from headrace.gateway.default import config_of

    if not served and (found := config_of(str(path))) is not None:
        return found
    return read_config(path, served)


def with_store(settings: GatewayConfig, work: Callable[[Store], Awaitable[T]]) -> T:
    """What ``work`` makes of the store of a gateway, which may be running."""
    from headrace.gateway.store import store_of

    async def opened() -> T:
        store = store_of(settings)
        try:
            await store.open()
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(opened())


def date(seconds: float | None) -> str:
    """A time in UTC, to the minute."""
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M")


def table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table: one line a row, however long, where it is not a terminal that shows it."""
    from rich.console import Console
    from rich.table import Table

    made = Table(*names, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    # what is cut or wrapped cannot be pasted: only a terminal gets its own width
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(made, soft_wrap=not sys.stdout.isatty(), markup=False)
