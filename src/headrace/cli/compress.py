"""headrace compress: smaller models, measured against what they were made of."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli import compress_convert, compress_train, options
from headrace.cli.progress import download_progress, stage_progress
from headrace.errors import ConfigError
from headrace.lab.compress.format_names import Format

if TYPE_CHECKING:
    from headrace.lab.compress.plan import Plan
    from headrace.lab.compress.quantize import Asked, Quantization
    from headrace.lab.compress.report import CompressReport

app = typer.Typer(no_args_is_help=True, help="Make a model smaller, and measure what that costs.")
app.command()(compress_convert.convert)
app.command()(compress_train.distill)
app.command()(compress_train.repair)
app.command()(compress_train.draft)

_QUANTIZE_HELP = "Round a model's weights by a recipe, compare it with its source, and let a gate decide."
_PRUNE_HELP = "Leave out weights, layers, channels or heads by a recipe; the rest as quantize."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=options.REFERENCE_HELP)]
OutputFormat = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="What loaders it is for. gguf: Q4_0, Q4_1, Q8_0; float: values in 16 bits, the default where "
        "nothing is rounded; else compressed-tensors.",
    ),
]
CalibrationSet = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="FILE|default",
        help="JSON Lines with text, messages, or prompt and completion; default: a mix out of packages.",
    ),
]
Template = Annotated[
    Literal["auto", "off"],
    typer.Option(
        "--calibration-template", help="Write conversations by the chat template, or as plain text."
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Sequences to calibrate with.")]
SequenceLength = Annotated[int, typer.Option(min=16, help="Tokens of a sequence, at most.")]
Suites = Annotated[
    list[str] | None,
    typer.Option("--suite", "-s", help="As of eval; repeat it or separate by commas. Default: perplexity."),
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="Text to compare on, instead of plays by Shakespeare."),
]
Tokens = Annotated[int, typer.Option(min=4, help="Tokens of text to compare on.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions per suite.")]
Shots = Annotated[str, typer.Option(metavar="N,N", help="Examples before each question, as of eval.")]
Speed = Annotated[bool, typer.Option("--speed", help="Also measure how fast both models are served.")]
Backend = Annotated[
    Literal["cpu", "torch"],
    typer.Option(help="What computes the comparison: cpu, as it is served, or torch, in float32."),
]


@app.command("prune", help=_PRUNE_HELP)
@app.command(help=_QUANTIZE_HELP)
def quantize(
    context: typer.Context,
    model: Model,
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="See headrace compress recipes; or a YAML file.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Appears when it is whole.")
    ],
    output_format: OutputFormat = None,
    calibration: CalibrationSet = "default",
    calibration_template: Template = "auto",
    samples: Samples = 64,
    sequence_length: SequenceLength = 512,
    gate: Annotated[
        str | None,
        typer.Option(metavar="FILE|default", help="Limits, as of eval; a model that breaks one is not kept."),
    ] = None,
    suite: Suites = None,
    text: Texts = None,
    tokens: Tokens = 4096,
    limit: Limit = None,
    shots: Shots = "0",
    backend: Backend = "cpu",
    no_eval: Annotated[bool, typer.Option("--no-eval", help="Do not compare it with its source.")] = False,
    speed: Speed = False,
    threads: options.Threads = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier FOLDER.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
) -> None:
    """Both commands: what is done says the recipe."""
    compress_train.need_torch()
    from headrace.lab.compress.quantize import Asked

    _require_steps(str(context.info_name), recipe)
    asked = Asked(
        model=model,
        recipe=recipe,
        output=output,
        output_format=output_format,
        calibration=calibration,
        calibration_template=calibration_template,
        samples=samples,
        sequence_length=sequence_length,
        gate=gate,
        suites=() if no_eval else _suites(suite),
        texts=tuple(text or ("shakespeare",)),
        tokens=tokens,
        limit=limit,
        shots=options.shot_counts(shots),
        backend=backend,
        speed=speed,
        threads=threads,
        overwrite=overwrite,
    )
    if no_eval and gate is not None:
        raise ConfigError("--gate judges what --no-eval leaves out: choose one.")
    report, opened = _run(asked, dry_run=dry_run)
    if report is None:
        return
    if report.gate_failures:
        for failure in report.gate_failures:
            print(f"gate: {failure}")
        print(f"gate: refused; the report is in {opened.refused}, the model is not kept")
        raise typer.Exit(1)
    if gate is not None:
        print("gate: passed")
    print(f"written: {output}")


@app.command()
def sweep(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Gets a folder each.")],
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Repeat it, or separate by commas. Default: all that round."),
    ] = None,
    output_format: OutputFormat = None,
    calibration: CalibrationSet = "default",
    calibration_template: Template = "auto",
    samples: Samples = 64,
    sequence_length: SequenceLength = 512,
    text: Texts = None,
    tokens: Tokens = 4096,
    backend: Backend = "cpu",
    speed: Speed = False,
    threads: options.Threads = 0,
) -> None:
    """Compress a model by several recipes, and draw size against divergence; goes on where it stopped."""
    compress_train.need_torch()
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("compress sweep needs matplotlib: pip install 'headrace[lab]'")
    from headrace.lab.compress.quantize import Asked
    from headrace.lab.compress.recipe import BUILT_IN
    from headrace.lab.compress.sweep import PICTURE_NAME, TABLE_NAME
    from headrace.lab.compress.sweep import sweep as run_sweep

    names = [name for each in recipe or [] for name in each.split(",") if name] or list(BUILT_IN)
    asked = Asked(
        model=model,
        recipe=names[0],
        output=output,
        output_format=output_format,
        calibration=calibration,
        calibration_template=calibration_template,
        samples=samples,
        sequence_length=sequence_length,
        texts=tuple(text or ("shakespeare",)),
        tokens=tokens,
        backend=backend,
        speed=speed,
        threads=threads,
    )
    with download_progress() as downloads, stage_progress() as progress:
        for entry in run_sweep(asked, names, progress=progress, downloads=downloads):
            print(f"{entry.name}: {entry.size_mib:.1f} MiB, KL {entry.kl:.5f}, {entry.report.seconds:.0f} s")
    print((output / TABLE_NAME).read_text("utf-8"), end="")
    print(f"picture: {output / PICTURE_NAME}")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this one as YAML.")] = None,
) -> None:
    """The recipes that come along; one of them as a file to begin with."""
    from headrace.lab.compress.recipe import BUILT_IN, PRUNING, named_recipe

    if name is None:
        print("\n".join([*BUILT_IN, *PRUNING]))
    else:
        print(named_recipe(name)[1].yaml(), end="")


def _require_steps(command: str, recipe: str) -> None:
    """Each command takes recipes that do what it is called; those that do both go to both."""
    from headrace.lab.compress.recipe import named_recipe

    name, found = named_recipe(recipe)
    if command == "quantize" and not found.rounds():
        raise ConfigError(f"The recipe {name} rounds nothing: headrace compress prune takes it.")
    if command == "prune" and not (found.prunes() or found.reshapes):
        raise ConfigError(f"The recipe {name} prunes nothing: headrace compress quantize takes it.")


def _run(asked: Asked, *, dry_run: bool) -> tuple[CompressReport | None, Quantization]:
    from headrace.lab.compress.quantize import Quantization

    with download_progress() as downloads:
        opened = Quantization(asked, downloads=downloads)
        for line in _preflight(opened, whole=dry_run):
            print(line)
        if dry_run:
            return None, opened
        with stage_progress() as opened.progress:
            report = opened.run()
    for note in report.notes[len(opened.plan.notes) :]:
        print(f"note: {note}")
    for line in report.lines():
        print(line)
    return report, opened


def _preflight(opened: Quantization, *, whole: bool) -> Iterator[str]:
    """What will be done: every tensor, or how many of each kind; how long it will take."""
    counts: dict[str, int] = {}
    for one in opened.plan.tensors:
        counts[one.words] = counts.get(one.words, 0) + 1
    if whole:
        yield from _tensor_lines(opened.plan)
    else:
        yield from (f"{count} tensors: {words}" for words, count in counts.items())
    yield from (f"note: {note}" for note in opened.plan.notes)
    calibration = opened.calibration
    if calibration is not None:
        about = calibration.about
        yield (
            f"calibration: {about['sequences']} sequences, {about['tokens']} tokens of {about['source']}; "
            f"chat template: {'yes' if about['chat_template'] else 'no'}, BOS: "
            f"{'yes' if about['bos'] else 'no'}"
        )
    estimate = opened.estimate()
    yield (
        f"estimate: about {max(estimate.seconds, 1):.0f} s and {estimate.memory_bytes / 2**20:.0f} MiB "
        "beside what Python and torch take"
    )
    if (done := opened.resumes()) > 0:
        yield f"goes on after {done} finished layers"


def _tensor_lines(plan: Plan) -> Iterator[str]:
    width = max(len(one.name) for one in plan.tensors)
    for one in plan.tensors:
        shape = "×".join(map(str, one.shape))
        yield f"{one.name:{width}}  {shape:>12}  {one.words}"


def _suites(given: list[str] | None) -> tuple[str, ...]:
    names = [name for each in given or [] for name in each.split(",") if name]
    return tuple(dict.fromkeys(names)) or ("perplexity",)
