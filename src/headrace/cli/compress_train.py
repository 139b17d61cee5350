"""headrace compress distill, repair and draft: training against a teacher."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace.cli import options
from headrace.cli.progress import download_progress, stage_progress
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.lab.compress.training.settings import Schedule
    from headrace.lab.compress.training.training import Asked, Training

_DEFAULT_MINUTES = 15.0

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Appears when it is whole.")]
Minutes = Annotated[float | None, typer.Option(help="Time to train; default 15, or as long as --steps take.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps to train; alone, the seed decides all.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences of a step.")]
MicroTokens = Annotated[
    int,
    typer.Option(min=16, help="Tokens computed at a time; gradients of a step add up. Fewer, less memory."),
]
Patience = Annotated[int, typer.Option(min=1, help="Evaluations without a better one after which it ends.")]
CheckpointMinutes = Annotated[float, typer.Option(min=0.0, help="Between two checkpoints.")]
Seed = Annotated[int, typer.Option(min=0, help="Of order, held-out data and what is generated.")]
Bf16 = Annotated[
    bool, typer.Option("--bf16/--no-bf16", help="Multiply matrices in bfloat16, where that is fast.")
]
Temperature = Annotated[float, typer.Option(min=0.05, help="Divides both models' logits.")]
TopK = Annotated[int | None, typer.Option(help="Learn the teacher's likeliest tokens only; default: all.")]
Store = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep those there, or take them from there: no teacher runs then."),
]
HiddenWeight = Annotated[float, typer.Option(min=0.0, help="Of hidden states' distance in the loss.")]
CeWeight = Annotated[float, typer.Option(min=0.0, help="Of the text's own cross-entropy in the loss.")]
DataSet = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE|default|self",
        help="JSON Lines with text, messages, or prompt and completion; default: a mix out of packages; "
        "self: questions that a chat model makes up.",
    ),
]
Template = Annotated[
    Literal["auto", "off"],
    typer.Option("--data-template", help="Write conversations by the chat template, or as plain text."),
]
Samples = Annotated[int, typer.Option(min=0, help="Sequences of the data.")]
SequenceLength = Annotated[int, typer.Option(min=16, help="Tokens of a sequence, at most.")]
HeldOut = Annotated[int, typer.Option(min=16, help="Tokens that judge and are not learned from.")]
Generate = Annotated[int, typer.Option(min=0, help="Sequences that the teacher makes itself, on the engine.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens that it adds to a prompt, at most.")]
Heat = Annotated[float, typer.Option("--generate-temperature", min=0.0, help="How it samples them.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="Text to compare on, instead of plays by Shakespeare."),
]
Tokens = Annotated[int, typer.Option(min=4, help="Tokens of text to compare on.")]
NoEval = Annotated[bool, typer.Option("--no-eval", help="Do not compare the result with its teacher.")]


def distill(
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help=options.REFERENCE_HELP)],
    student: Annotated[
        str,
        typer.Option(
            metavar="MODEL|SIZES.yaml", help="A smaller model of the same vocabulary, or sizes of one."
        ),
    ],
    output: Output,
    minutes: Minutes = None,
    steps: Steps = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 3e-4,
    batch_size: BatchSize = 8,
    micro_tokens: MicroTokens = 1024,
    patience: Patience = 4,
    checkpoint_minutes: CheckpointMinutes = 5.0,
    seed: Seed = 0,
    bf16: Bf16 = True,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    store: Store = None,
    hidden_weight: HiddenWeight = 0.0,
    ce_weight: CeWeight = 0.0,
    freeze_embeddings: Annotated[
        bool, typer.Option("--freeze-embeddings", help="Leave the embedding and the head as they are.")
    ] = False,
    data: DataSet = "default",
    data_template: Template = "auto",
    samples: Samples = 512,
    sequence_length: SequenceLength = 256,
    held_out_tokens: HeldOut = 2048,
    generate: Generate = 0,
    new_tokens: NewTokens = 128,
    generate_temperature: Heat = 1.0,
    text: Texts = None,
    tokens: Tokens = 4096,
    no_eval: NoEval = False,
    threads: options.Threads = 0,
) -> None:
    """Teach a smaller model to say what a larger one says; goes on where it stopped."""
    need_torch()
    from headrace.lab.compress.training.distill import Distillation

    asked = _asked(
        teacher,
        output,
        _schedule(
            minutes,
            steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            micro_tokens=micro_tokens,
            patience=patience,
            checkpoint_minutes=checkpoint_minutes,
            seed=seed,
            bf16=bf16,
        ),
        temperature=temperature,
        hidden=hidden_weight,
        cross_entropy=ce_weight,
        data=data,
        template=data_template,
        samples=samples,
        sequence_length=sequence_length,
        held_out_tokens=held_out_tokens,
        generate=generate,
        new_tokens=new_tokens,
        generate_temperature=generate_temperature,
        top_k=top_k,
        store=store,
        texts=tuple(text or ("shakespeare",)),
        tokens=tokens,
        evaluate=not no_eval,
        threads=threads,
    )
    _run(lambda **told: Distillation(asked, student=student, embeddings=not freeze_embeddings, **told))


def repair(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of headrace compress quantize, or alike.")],
    teacher: Annotated[str, typer.Option(metavar="MODEL", help="The floats that it was made of.")],
    output: Output,
    weights: Annotated[
        bool, typer.Option("--weights", help="Move weights to other codes, too, not scales and norms alone.")
    ] = False,
    minutes: Minutes = None,
    steps: Steps = None,
    learning_rate: Annotated[
        float, typer.Option(help="At its highest; scales and norms change by shares of themselves.")
    ] = 1e-3,
    batch_size: BatchSize = 8,
    micro_tokens: MicroTokens = 1024,
    patience: Patience = 3,
    checkpoint_minutes: CheckpointMinutes = 5.0,
    seed: Seed = 0,
    bf16: Bf16 = False,
    temperature: Temperature = 1.0,
    data: DataSet = "default",
    data_template: Template = "auto",
    samples: Samples = 256,
    sequence_length: SequenceLength = 256,
    held_out_tokens: HeldOut = 2048,
    text: Texts = None,
    tokens: Tokens = 4096,
    no_eval: NoEval = False,
    threads: options.Threads = 0,
) -> None:
    """Teach a quantised model what rounding took: same format, same size, nearer to its source."""
    need_torch()
    from headrace.lab.compress.training.repair import Repair

    asked = _asked(
        teacher,
        output,
        _schedule(
            minutes,
            steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            micro_tokens=micro_tokens,
            patience=patience,
            checkpoint_minutes=checkpoint_minutes,
            seed=seed,
            bf16=bf16,
        ),
        temperature=temperature,
        data=data,
        template=data_template,
        samples=samples,
        sequence_length=sequence_length,
        held_out_tokens=held_out_tokens,
        texts=tuple(text or ("shakespeare",)),
        tokens=tokens,
        evaluate=not no_eval,
        threads=threads,
    )
    _run(lambda **told: Repair(asked, model=model, codes=weights, **told))


def draft(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=options.REFERENCE_HELP)],
    output: Output,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT|NUMBERS",
            help="Of the target's: so many, evenly spread, or 0,1,29: these; default: an eighth of them.",
        ),
    ] = None,
    quantization: Annotated[
        Literal["int8", "int4", "off"], typer.Option(help="How the draft is narrowed when it is loaded.")
    ] = "int4",
    minutes: Minutes = None,
    steps: Steps = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 6e-4,
    batch_size: BatchSize = 8,
    micro_tokens: MicroTokens = 1024,
    patience: Patience = 4,
    checkpoint_minutes: CheckpointMinutes = 5.0,
    seed: Seed = 0,
    bf16: Bf16 = True,
    data: DataSet = "default",
    samples: Samples = 0,
    sequence_length: SequenceLength = 256,
    held_out_tokens: HeldOut = 2048,
    generate: Generate = 512,
    new_tokens: NewTokens = 128,
    generate_temperature: Heat = 0.7,
    top_k: Annotated[int, typer.Option(help="Learn the target's likeliest tokens only.")] = 64,
    threads: options.Threads = 0,
) -> None:
    """Make a small model that drafts for TARGET, and measure whether that pays on this machine."""
    need_torch()
    from headrace.lab.compress.training.draft import Draft

    asked = _asked(
        target,
        output,
        _schedule(
            minutes,
            steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            micro_tokens=micro_tokens,
            patience=patience,
            checkpoint_minutes=checkpoint_minutes,
            seed=seed,
            bf16=bf16,
        ),
        data=data,
        samples=samples,
        sequence_length=sequence_length,
        held_out_tokens=held_out_tokens,
        generate=generate,
        new_tokens=new_tokens,
        generate_temperature=generate_temperature,
        top_k=top_k,
        evaluate=False,
        threads=threads,
    )
    narrowed = None if quantization == "off" else quantization
    chosen = None if layers is None else _layers(layers)
    _run(lambda **told: Draft(asked, layers=chosen, quantization=narrowed, **told))
    setting = f'"method": "draft_model", "model": "{output}"'
    if narrowed is not None:
        setting += f', "quantization": "{narrowed}"'
    print(f"headrace serve {target} --speculative-config '{{{setting}}}'")


def _layers(text: str) -> int | list[int]:
    """A count, or numbers between commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--layers: {text!r} must be a count, or numbers of layers: 4, or 0,1,29."
        ) from None
    return numbers if "," in text else numbers[0]


def _schedule(minutes: float | None, steps: int | None, **settings: Any) -> Schedule:
    from headrace.lab.compress.training.settings import Schedule

    if minutes is None and steps is None:
        minutes = _DEFAULT_MINUTES
    return Schedule(minutes=minutes, steps=steps, **settings)


def _asked(
    teacher: str,
    output: Path,
    schedule: Schedule,
    *,
    temperature: float = 1.0,
    hidden: float = 0.0,
    cross_entropy: float = 0.0,
    **settings: Any,
) -> Asked:
    from headrace.lab.compress.training.losses import Terms
    from headrace.lab.compress.training.training import Asked

    terms = Terms(temperature, hidden, cross_entropy)
    return Asked(teacher=teacher, output=output, schedule=schedule, terms=terms, **settings)


def _run(open_training: Callable[..., Training]) -> None:
    with download_progress() as downloads:
        training = open_training(downloads=downloads, note=_say)
        step = training.resumes()
        if step is not None:
            _say(f"goes on after step {step}")
        with stage_progress() as training.progress:
            report = training.run()
    for line in report.lines():
        print(line)
    print(f"written: {training.output.path}")


def _say(line: str) -> None:
    print(line, flush=True)


def need_torch() -> None:
    """Raise ConfigError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("compress needs torch: pip install 'headrace[compress]'")
