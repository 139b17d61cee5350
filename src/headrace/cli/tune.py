"""headrace tune: search the server's switches for the configuration that serves a workload best."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import bench, options
from headrace.cli.config_file import given_options, options_of
from headrace.cli.serve import serve
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.lab.tune.outcome import Outcome
    from headrace.lab.tune.trial import Setup


def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=options.REFERENCE_HELP)
    ] = options.DEFAULT_MODEL,
    slo: Annotated[
        str | None,
        typer.Option(help="Objectives, such as ttft=500ms,tpot=50ms: goodput is searched, not throughput."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time of the whole search.")] = 10.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Most configurations to try, earlier runs' included.")
    ] = None,
    switches: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,…", help="Search only these. Default: all that apply.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Closed loop: users at a time.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop instead: requests a second.")
    ] = None,
    arrivals: options.Arrivals = "poisson",
    duration: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Window of a trial.")] = 9.0,
    warmup: options.Warmup = 2.0,
    prompt_tokens: options.PromptTokens = "128",
    output_tokens: options.OutputTokens = "64",
    shared_prefix: options.SharedPrefix = 0.0,
    turns: options.Turns = 1,
    prompts: options.Prompts = None,
    dataset: options.Dataset = None,
    gate: Annotated[
        str,
        typer.Option(
            metavar="FILE|default",
            help="Limits, as of eval, for choices that change answers.",
        ),
    ] = "default",
    gate_text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text that the gate reads, instead of plays by Shakespeare."),
    ] = None,
    gate_tokens: Annotated[int, typer.Option(min=4, help="Tokens of text that the gate reads.")] = 1024,
    serve_options: Annotated[
        str, typer.Option("--serve", help='Options that every server gets, such as "--max-model-len 2048".')
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrivals and the search.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Default: tune- and the model.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start FOLDER afresh.")] = False,
) -> None:
    """Find the options of headrace serve that serve a workload best on this machine."""
    bench.need_lab("tune", "optuna")
    if prompts is not None and dataset is not None:
        raise ConfigError("--prompts and --dataset exclude each other: choose one")
    fixed = _fixed(serve_options)
    from headrace.lab.bench.lengths import parse_lengths
    from headrace.lab.bench.run import Asked
    from headrace.lab.bench.session import Plan
    from headrace.lab.bench.slo import parse_slo
    from headrace.lab.tune.trial import Setup

    asked = Asked(
        prompt_tokens=parse_lengths(prompt_tokens, "--prompt-tokens"),
        output_tokens=parse_lengths(output_tokens, "--output-tokens"),
        shared_prefix=shared_prefix,
        turns=turns,
        prompts=prompts,
        dataset=dataset,
    )
    plan = Plan(
        kind="closed" if rate is None else "open",
        levels=(float(concurrency) if rate is None else rate,),
        duration_s=duration,
        warmup_s=warmup,
        arrivals=arrivals,
        slo=parse_slo(slo) if slo else None,
        early_stop=False,
        seed=seed,
    )
    setup = Setup(
        model=bench.pulled(model),
        fixed=shlex.split(serve_options),
        asked=asked,
        plan=plan,
        api_key=os.environ.get("HEADRACE_API_KEY"),
        loop_factory=bench.loop_factory(),
    )
    _search(
        setup,
        fixed=fixed,
        only=None if switches is None else [name for name in re.split(r"[,\s]+", switches) if name],
        gate=gate,
        texts=gate_text,
        tokens=gate_tokens,
        folder=output or Path(f"tune-{bench.file_name(model)}"),
        overwrite=overwrite,
        budget_s=minutes * 60,
        most=trials,
    )


def _fixed(text: str) -> dict[str, Any]:
    fixed = given_options(serve, text, "--serve")
    if "model" in fixed:
        raise ConfigError("--serve: the model is named once, for tune itself")
    known = options_of(serve)
    for name in fixed:
        if variable := getattr(
            known[name].info, "envvar", None
        ):  # best.yaml and the process list would show it
            raise ConfigError(f"--serve: {name} is a secret: give it as {variable}")
    return fixed


def _search(
    setup: Setup,
    *,
    fixed: dict[str, Any],
    only: list[str] | None,
    gate: str,
    texts: list[str] | None,
    tokens: int,
    folder: Path,
    overwrite: bool,
    budget_s: float,
    most: int | None,
) -> None:
    from rich.console import Console

    from headrace.cli.progress import download_progress
    from headrace.lab.evaluate.evaluation import Settings
    from headrace.lab.evaluate.gate import named_gate
    from headrace.lab.evaluate.texts import SHAKESPEARE
    from headrace.lab.tune.accuracy import AccuracyGate
    from headrace.lab.tune.folder import Folder
    from headrace.lab.tune.run import Tuning
    from headrace.lab.tune.subject import about, subject
    from headrace.lab.tune.switches import space
    from headrace.lab.tune.terminal import TerminalView

    known = {name: option.default for name, option in options_of(serve).items() if name not in fixed}
    dimensions = space(subject(setup.model, known, setup.plan), only)
    limits = named_gate(gate)
    evaluated = Settings(
        model=setup.model,
        texts=tuple(texts or (SHAKESPEARE,)),
        tokens=tokens,
        backend=fixed.get("backend", "cpu"),
        device=fixed.get("device", "cpu"),
        threads=fixed.get("threads", 0),
    )
    view = TerminalView(Console(stderr=True), setup.goal)
    described = about(setup, dimensions, limits, evaluated)
    with Folder(folder, described, overwrite=overwrite) as opened, download_progress() as downloads:
        tuning = Tuning(
            setup=setup,
            dimensions=dimensions,
            gate=AccuracyGate(limits, evaluated, opened.path, downloads),
            folder=opened,
            about=described,
            serve=fixed,
            view=view,
            budget_s=budget_s,
            most=most,
        )
        try:
            outcome = tuning.run()
        finally:
            view.close()
    _show(outcome, folder)


def _show(outcome: Outcome, folder: Path) -> None:
    from rich.console import Console

    from headrace.lab.tune.report import comparison_in
    from headrace.lab.tune.terminal import show

    comparison = comparison_in(folder) if outcome.confirmed is not None else None
    show(outcome, comparison, Console(width=None if sys.stdout.isatty() else 200))
    best = folder / "best.yaml"
    print(f"report: {folder / 'report.html'}\ntry it: headrace serve --config {shlex.quote(str(best))}")
