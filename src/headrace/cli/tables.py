"""Plain tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def print_table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Columns under their names; what is not a terminal gets lines as long as they are."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # what is cut or wrapped cannot be pasted: only a terminal gets its own width
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table, soft_wrap=not sys.stdout.isatty(), markup=False)
