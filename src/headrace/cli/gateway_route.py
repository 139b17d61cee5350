"""headrace gateway route: train, measure and question the classifier of intents."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.gateway_shared import AsJson, table
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.intents.classifier import Classifier, Judgement
    from headrace.gateway.intents.evaluation import Report
    from headrace.gateway.intents.examples import Example
    from headrace.gateway.intents.features import Floats

app = typer.Typer(no_args_is_help=True, help="The classifier of intents: train, measure, explain.")

_DEFAULT_EMBEDDER = "minilm-l6"
_HEADS = ("with embeddings", "features only")

Embedder = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Sentence encoder, run here. Default: the classifier's own."),
]
ClassifierFile = Annotated[
    Path | None, typer.Option("--classifier", metavar="FILE", help="Default: the shipped one.")
]


@app.command()
def train(
    labelled: Annotated[
        Path, typer.Argument(metavar="LABELLED", help="JSON Lines: text, intent, difficulty, group.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where it is written.")],
    held_out: Annotated[
        float, typer.Option(min=0.01, max=0.9, metavar="SHARE", help="Of the examples, to measure on.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
    embedder: Embedder = None,
    as_json: AsJson = False,
) -> None:
    """Train a classifier from LABELLED.

    It is measured on examples that it was not trained on, no group of which it has seen; the one that is
    written has then learnt from all of them.
    """
    from headrace.gateway.intents.classifier import Classifier
    from headrace.gateway.intents.evaluation import judge_all, report
    from headrace.gateway.intents.examples import read_examples, split
    from headrace.gateway.intents.training import train as fit

    if not output.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} to write {output.name} to")
    examples = read_examples(labelled)
    kept, out = split(examples, held_out, seed)
    if not out or {example.intent for example in kept} != {example.intent for example in examples}:
        raise ConfigError(
            f"{labelled}: every intent needs several groups of examples, to train on some and hold out others"
        )
    name = embedder or _DEFAULT_EMBEDDER
    vectors = dict(zip(examples, _embeddings(examples, name), strict=True))
    measured = Classifier(fit(kept, _rows(kept, vectors), name, seed=seed))
    reports = [report(out, judge_all(measured, out, rows)) for rows in (_rows(out, vectors), None)]
    made = fit(examples, _rows(examples, vectors), name, seed=seed)
    output.write_text(made.model_dump_json() + "\n", "utf-8")
    if as_json:
        _print_json(reports)
        return
    print(f"Trained on {len(kept)} examples, measured on {len(out)} of other groups.")
    _print_reports(reports)
    print(f"\n{output} has learnt from all {len(examples)}.")


@app.command(name="eval")
def evaluate(
    labelled: Annotated[
        Path | None, typer.Argument(metavar="LABELLED", help="JSON Lines. Default: those held out by us.")
    ] = None,
    classifier: ClassifierFile = None,
    embedder: Embedder = None,
    as_json: AsJson = False,
) -> None:
    """Measure a classifier: accuracy, F1, calibration, difficulty."""
    from headrace.gateway.intents.classifier import read_classifier
    from headrace.gateway.intents.evaluation import judge_all, report
    from headrace.gateway.intents.examples import read_examples, shipped

    read = read_classifier(classifier)
    examples = read_examples(labelled or shipped("held-out.jsonl"))
    vectors = _embeddings(examples, embedder or read.embedder)
    _check_size(read, vectors)
    reports = [report(examples, judge_all(read, examples, rows)) for rows in (vectors, None)]
    if as_json:
        _print_json(reports)
    else:
        _print_reports(reports)


@app.command()
def explain(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What a user asks.")],
    classifier: ClassifierFile = None,
    embedder: Embedder = None,
    features_only: Annotated[
        bool, typer.Option("--features-only", help="As if no embedding came in time.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="A gateway's file: say what its routes choose.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what TEXT is taken for, and why."""
    from headrace.gateway.intents.classifier import read_classifier
    from headrace.gateway.intents.examples import Example

    settings = None
    if config is not None:
        from headrace.cli.gateway_shared import read as read_settings

        settings = read_settings(config)
        classifier = classifier or settings.classifier
    if not text.strip():
        raise ConfigError("TEXT is empty: there is nothing to explain")
    read = read_classifier(classifier)
    vector = None
    if not features_only:
        vectors = _embeddings([Example(text, "")], embedder or read.embedder)
        _check_size(read, vectors)
        [vector] = vectors
    judgement = read.judge(text, vector)
    shares = read.shares(text, vector, judgement.intent)
    choices = {} if settings is None else _choices(settings, read, text, judgement)
    if as_json:
        json.dump({**asdict(judgement), "shares": shares, "routes": choices}, sys.stdout, indent=2)
        print()
        return
    print(f"{judgement.intent}, confidence {judgement.confidence:.2f}, difficulty {judgement.difficulty:.2f}")
    others = sorted(judgement.probabilities.items(), key=lambda one: -one[1])
    print("intents: " + ", ".join(f"{intent} {share:.3f}" for intent, share in others))
    most = sorted(shares.items(), key=lambda one: -abs(one[1]))[:6]
    print(f"for {judgement.intent}: " + ", ".join(f"{name} {share:+.2f}" for name, share in most))
    for name, choice in choices.items():
        print(f"route {name}: {choice['model']} ({choice['reason']})")


@app.command()
def examples(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write them.")],
) -> None:
    """Write the examples that the shipped classifier was trained on, to add your own to."""
    from headrace.gateway.intents.examples import shipped

    if output.exists():
        raise ConfigError(f"{output} exists already; name another file")
    shutil.copyfile(shipped("training.jsonl"), output)
    print(f"wrote {output}")


def _choices(
    settings: GatewayConfig, classifier: Classifier, text: str, judgement: Judgement
) -> dict[str, dict[str, str]]:
    """What each route of a gateway would choose for a request of this text that names no maximum."""
    from headrace.gateway.intents.policy import Policy
    from headrace.gateway.usage import Usage, cost, prompt_estimate

    out = {}
    tokens = prompt_estimate({"messages": [{"role": "user", "content": text}]})
    most = Usage(tokens, settings.default_output_tokens)
    for name, route in settings.routes.items():
        costs = {
            model: max(cost(price, most) for price in settings.prices(model)) for model in route.candidates
        }
        model, reason = Policy(name, route, classifier).choose([*costs], judgement, costs)
        out[name] = {"model": model, "reason": reason}
    return out


def _embeddings(examples: Sequence[Example], model: str) -> Floats:
    """float32 [n, dimensions], of what the gateway would have embedded."""
    import numpy as np

    from headrace.cli.progress import download_progress
    from headrace.frontend.llm import LLM
    from headrace.gateway.intents.features import embedded

    with download_progress() as progress, LLM(model, progress=progress) as llm:
        try:
            found = llm.embed(
                [embedded(example.text) for example in examples],
                use_tqdm=sys.stderr.isatty() and len(examples) > 1,
                truncate_prompt_tokens=-1,
            )
        except HeadraceError as error:
            raise ConfigError(f"{model} cannot embed: {error.message}") from None
    vectors = np.array([output.outputs.embedding for output in found], dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    out: Floats = vectors / np.maximum(lengths, 1e-12)
    return out


def _check_size(classifier: Classifier, vectors: Floats) -> None:
    if vectors.shape[1] != classifier.dimensions:
        raise ConfigError(
            f"the embedder has {vectors.shape[1]} dimensions, and the classifier was trained on "
            f"{classifier.dimensions} of {classifier.embedder}"
        )


def _rows(examples: Sequence[Example], vectors: dict[Example, Floats]) -> Floats:
    import numpy as np

    return np.stack([vectors[example] for example in examples])


def _print_json(reports: Sequence[Report]) -> None:
    names = [head.replace(" ", "_") for head in _HEADS]
    json.dump(
        {name: asdict(report) for name, report in zip(names, reports, strict=True)}, sys.stdout, indent=2
    )
    print()


def _print_reports(reports: Sequence[Report]) -> None:
    first = reports[0]
    rows = [
        ("accuracy", *(f"{one.accuracy:.3f} ± {one.accuracy_se:.3f}" for one in reports)),
        ("macro F1", *(f"{one.macro_f1:.3f}" for one in reports)),
        ("ECE", *(f"{one.ece:.3f}" for one in reports)),
        ("mean confidence", *(f"{one.confidence:.3f}" for one in reports)),
        ("log loss", *(f"{one.log_loss:.3f}" for one in reports)),
    ]
    if first.difficulty_baseline is not None:
        rows.append(("difficulty MAE", *(f"{one.difficulty_mae:.3f}" for one in reports)))
        rows.append(("MAE of the mean", *[f"{first.difficulty_baseline:.3f}"] * len(reports)))
    table((f"{first.examples} examples", *_HEADS), rows)
    print()
    scores = [
        (
            score.intent,
            str(score.support),
            *(
                f"{one.intents[at].precision:.2f} {one.intents[at].recall:.2f} {one.intents[at].f1:.2f}"
                for one in reports
            ),
        )
        for at, score in enumerate(first.intents)
    ]
    table(("precision, recall, F1", "examples", *_HEADS), scores)
    if first.confused:
        told = [f"{intent} as {taken} {count}" for intent, taken, count in first.confused[:6]]
        print(f"\nwith embeddings, most often confused: {', '.join(told)}")
