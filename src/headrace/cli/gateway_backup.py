"""headrace gateway backup: a copy of the state of a gateway, which may be running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.gateway_shared import Config, opened, read


def backup(
    config: Config,
    to: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes; it must not exist.")],
) -> None:
    """Copy keys, quotas, releases and the ledger to FILE, as of one moment; the cache is left out."""
    settings = read(config)
    with opened(settings) as store:
        size = store.back_up(to)
    print(f"{to}: {size} bytes; to restore, put it in the place of {settings.state / 'gateway.sqlite'}")
