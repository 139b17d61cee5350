"""headrace gateway backup: a copy of the state of a gateway, which may be running."""

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
    restored = f"put it in the place of {settings.state / 'gateway.sqlite'}"
    if settings.store is not None:
        restored += ", and take `store` out of the configuration"
    print(f"{to}: {size} bytes; to restore, {restored}")
