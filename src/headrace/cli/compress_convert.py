"""headrace compress convert: a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import options
from headrace.cli.progress import download_progress, stage_progress
from headrace.lab.compress.format_names import Rounding, Target


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=options.REFERENCE_HELP)],
    target: Annotated[
        Target,
        typer.Option("--format", help="What to write; bf16, f16, f32: safetensors of floats."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Appears when it is whole.")
    ],
    rounding: Annotated[
        Rounding | None,
        typer.Option(
            help="How floats are rounded, to nearest; default int4. GGUF's types say it themselves."
        ),
    ] = None,
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale, or the largest that fits; -1: one an output.")
    ] = 128,
) -> None:
    """Write a model in another format; rounded weights keep their codes where it has room for them."""
    from headrace.lab.compress.convert import convert as run

    with download_progress() as downloads, stage_progress() as progress:
        outcome = run(
            model,
            target,
            output,
            rounding=rounding,
            group_size=group_size,
            downloads=downloads,
            progress=progress,
        )
    said = []
    if outcome.kept:
        said.append(f"{outcome.kept} weights keep their codes")
    if outcome.rounded:
        said.append(f"{outcome.rounded} are rounded to nearest: {outcome.rounding}")
    if outcome.floats:
        said.append(f"{outcome.floats} are floats")
    print("; ".join(said))
    print(f"written: {output}")
