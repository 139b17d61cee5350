"""headrace eval: how good is a model, and how much worse than another; a gate for CI."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import options
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.lab.evaluate.evaluation import Evaluation
    from headrace.lab.evaluate.gate import Gate
    from headrace.model.store import Progress

_SUITES_HELP = (
    "perplexity, hellaswag, truthfulqa, gsm8k, arithmetic, needle, json, all, or a YAML file of your own; "
    "repeat it or separate by commas. Default: perplexity, hellaswag, truthfulqa."
)


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=options.REFERENCE_HELP)] = DEFAULT_MODEL,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REF", help="Compare with this model; float32 = the same one, computed exactly."
        ),
    ] = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", "-s", help=_SUITES_HELP)] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Text for perplexity, instead of plays by Shakespeare; repeatable."
        ),
    ] = None,
    convention: Annotated[
        Literal["windows", "llama.cpp"], typer.Option(help="How perplexity cuts and counts.")
    ] = "windows",
    context_length: Annotated[
        int | None, typer.Option(min=4, help="Of perplexity; default: 1024, with llama.cpp 512.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens of text that perplexity reads.")] = 8192,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions per suite.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of generated questions and the bootstrap.")] = 0,
    gate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of limits; exit status 1 if any is broken.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write results as JSON; resumes what is there."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start FILE afresh.")] = False,
    reference_logits: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the reference's logits here, or use those that are."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="MODEL answers behind an OpenAI-compatible URL (…/v1)."),
    ] = None,
    quantization: options.Quantization = None,
    threads: options.Threads = 0,
    backend: options.Backend = "cpu",
    device: options.Device = "cpu",
) -> None:
    """Score a model, alone or against another, and gate the difference."""
    from headrace.cli.progress import download_progress
    from headrace.lab.evaluate.evaluation import DEFAULT_SUITES, SUITES, Evaluation, Settings
    from headrace.lab.evaluate.gate import read_gate

    suites = tuple(dict.fromkeys(name for each in suite or [] for name in each.split(",") if name))
    if "all" in suites:
        suites = tuple(dict.fromkeys([*SUITES, *(name for name in suites if name != "all")]))
    limits = None if gate is None else read_gate(gate)
    if limits is not None and limits.needs_reference() and against is None and reference_logits is None:
        raise ConfigError(f"{gate} compares with a reference: name one with --against.")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"The folder of {output} does not exist.")
    settings = Settings(
        model=model,
        against=against,
        suites=suites or DEFAULT_SUITES,
        texts=tuple(text or ("shakespeare",)),
        convention=convention,
        context_length=context_length,
        tokens=tokens,
        limit=limit,
        seed=seed,
        quantization=quantization,
        backend=backend,
        device=device,
        threads=threads,
        endpoint=endpoint,
        reference_logits=reference_logits,
    )
    with download_progress() as downloads:
        evaluation = Evaluation(settings, output=output, downloads=downloads, overwrite=overwrite)
        if limits is not None and (missing := limits.needs() - evaluation.suites()):
            raise ConfigError(f"{gate} has limits on {', '.join(sorted(missing))}: add --suite for it.")
        try:
            with _suite_progress() as evaluation.progress:
                evaluation.run()
        finally:  # also what was finished before Ctrl-C or an error
            _show(evaluation)
    if limits is not None:
        _judge(limits, evaluation)


def _show(evaluation: Evaluation) -> None:
    from rich.console import Console

    from headrace.lab.evaluate.table import notes, tables

    # a pipe gets whole lines: what is cut at some width cannot be searched
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=1000, highlight=False)
    for table in tables(evaluation.report):
        console.print(table)
        console.print()
    for note in notes(evaluation.report):
        console.print(note)
    if evaluation.reused:
        console.print(f"not run again: {', '.join(evaluation.reused)} (in {evaluation.output})")


def _judge(limits: Gate, evaluation: Evaluation) -> None:
    failures = limits.failures(evaluation.report)
    for failure in failures:
        print(f"gate: {failure}")
    print(f"gate: {'refused' if failures else 'passed'}")
    if failures:
        raise typer.Exit(1)


@contextmanager
def _suite_progress() -> Iterator[Progress]:
    """A bar of the running suite on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda suite, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def update(suite: str, done: int, total: int) -> None:
            if suite not in tasks:
                tasks[suite] = bars.add_task(suite, total=total)
            bars.update(tasks[suite], completed=done, total=total)

        yield update
