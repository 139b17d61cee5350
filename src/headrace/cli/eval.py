"""headrace eval: how good is a model, and how much worse than another; a gate for CI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import options
from headrace.cli.progress import download_progress, stage_progress
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.lab.evaluate.evaluation import Evaluation
    from headrace.lab.evaluate.gate import Gate

_SUITES_HELP = (
    "perplexity, hellaswag, truthfulqa, gsm8k, arithmetic, needle, json, humaneval, all (but humaneval), or "
    "a YAML file of your own; repeat it or separate by commas. Default: perplexity, hellaswag, truthfulqa."
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
    seed: Annotated[
        int, typer.Option(min=0, help="Of generated questions, drawn examples and the bootstrap.")
    ] = 0,
    shots: Annotated[
        str, typer.Option(metavar="N,N", help="Examples before each question; each number is scored.")
    ] = "0",
    orderings: Annotated[
        int, typer.Option(min=1, help="Draws of examples for each number of them: how far scores spread.")
    ] = 3,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Let humaneval run what the model writes, in a sandbox.")
    ] = False,
    unsafe_without_isolation: Annotated[
        bool,
        typer.Option(
            "--unsafe-without-isolation",
            help="Where the kernel allows no sandbox: run it with your files and network in its reach.",
        ),
    ] = False,
    harness: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Tasks of lm-evaluation-harness, by commas.")
    ] = None,
    harness_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="lm-eval tasks of your own, as YAML files.")
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML of limits, or `default`; exit status 1 if any is broken."),
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
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="REF", help="Who has the tokenizer of the endpoint's model; default: MODEL."),
    ] = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    threads: options.Threads = 0,
    backend: options.Backend = "cpu",
    device: options.Device = "cpu",
) -> None:
    """Score a model, alone or against another, and gate the difference."""
    from headrace.lab.evaluate.evaluation import DEFAULT_SUITES, HARNESS, SUITES, Evaluation, Settings
    from headrace.lab.evaluate.gate import named_gate

    suites = tuple(dict.fromkeys(name for each in suite or [] for name in each.split(",") if name))
    if "all" in suites:
        every = [name for name in SUITES if name != "humaneval" or execute_code]
        suites = tuple(dict.fromkeys([*every, *(name for name in suites if name != "all")]))
    suites += tuple(f"{HARNESS}{name.strip()}" for name in (harness or "").split(",") if name.strip())
    if unsafe_without_isolation and not execute_code:
        raise ConfigError("--unsafe-without-isolation says how; --execute-code says that code may run.")
    limits = None if gate is None else named_gate(gate)
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
        kv_cache_dtype=kv_cache_dtype,
        backend=backend,
        device=device,
        threads=threads,
        endpoint=endpoint,
        tokenizer=tokenizer,
        reference_logits=reference_logits,
        shots=options.shot_counts(shots),
        orderings=orderings,
        execute_code=("unsafe" if unsafe_without_isolation else "isolated") if execute_code else None,
        harness_path=harness_path,
    )
    with download_progress() as downloads:
        evaluation = Evaluation(settings, output=output, downloads=downloads, overwrite=overwrite)
        if limits is not None and (missing := limits.needs() - evaluation.suites()):
            raise ConfigError(f"{gate} has limits on {', '.join(sorted(missing))}: add --suite for it.")
        try:
            with stage_progress() as evaluation.progress:
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
    from headrace.lab.evaluate.gate import fallen

    failures = limits.failures(evaluation.report)
    for failure in failures:
        print(f"gate: {failure}")
    print(f"gate: refused, by {', '.join(fallen(failures))}" if failures else "gate: passed")
    if failures:
        raise typer.Exit(1)
