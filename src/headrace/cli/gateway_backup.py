"""headrace gateway backup and restore: a copy of the state of a gateway, which may be running, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.gateway_shared import Config, read, with_store


def backup(
    config: Config,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes; it must not exist.")],
) -> None:
    """Copy keys, quotas, releases and the ledger to FILE, a SQLite file; the cache is left out."""
    settings = read(config)
    size = with_store(settings, lambda store: store.back_up(to))
    print(f"{to}: {size} bytes; `headrace gateway restore` fills an empty store with it")


def restore(
    config: Config,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What `headrace gateway backup` has made.")],
) -> None:
    """Fill the empty store of CONFIG with FILE: after a loss, or to move from a file to Redis or back."""
    rows = with_store(read(config), lambda store: store.restore(source))
    print(f"restored keys, quotas, releases and {rows} rows of the ledger")
