"""headrace doctor: what this machine can do, and what would make it faster."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

_STYLES = {"ok": "green", "slower": "yellow", "broken": "bold red"}


def doctor(
    network: Annotated[
        str | None, typer.Option(metavar="URL", help="Also download from there, to measure the speed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Check this machine: ok, slower or broken, what that costs, and the fix. Broken exits with 1."""
    from headrace.lab.doctor import checks

    broken = False
    if as_json:
        found = list(checks(network))
        broken = any(check.status == "broken" for check in found)
        print(json.dumps([check.as_dict() for check in found], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        # a pipe gets whole lines: what is cut at some width cannot be searched
        console = Console(highlight=False) if sys.stdout.isatty() else Console(width=1000)
        for check in checks(network):
            broken |= check.status == "broken"
            line = Text.assemble(
                (f"{check.status:<7}", _STYLES[check.status]), f" {check.name:<10} ", check.finding
            )
            console.print(line, soft_wrap=True)
            if check.cost:
                console.print(Text(f"{'':<19}costs: {check.cost}"), soft_wrap=True)
            if check.fix:
                console.print(Text(f"{'':<19}→ {check.fix}"), soft_wrap=True)
    if broken:
        raise typer.Exit(1)
