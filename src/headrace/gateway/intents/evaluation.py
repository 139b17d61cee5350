"""How good a classifier is: accuracy, F1 of each intent, calibration, and the error of its difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError
from headrace.gateway.intents.classifier import Classifier, Judgement
from headrace.gateway.intents.examples import Example
from headrace.gateway.intents.features import Floats

_BINS = 10


@dataclass(frozen=True, slots=True)
class IntentScore:
    """Of one intent. ``support``: how many examples have it."""

    intent: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True, slots=True)
class Report:
    """Of a classifier on labelled examples.

    ``accuracy_se``: its standard error. ``ece``: expected calibration error, in 10 bins of equal width (Guo
    et al., 2017). ``confidence``: the mean, which equals the accuracy of a calibrated classifier.
    ``difficulty_mae``: mean absolute error, and ``difficulty_baseline`` that of always saying the examples'
    mean; None if no example has a difficulty. ``confused``: intent, what it was taken for, and how often, the
    most frequent first.
    """

    examples: int
    accuracy: float
    accuracy_se: float
    macro_f1: float
    ece: float
    log_loss: float
    confidence: float
    difficulty_mae: float | None
    difficulty_baseline: float | None
    intents: list[IntentScore]
    confused: list[tuple[str, str, int]]


def judge_all(
    classifier: Classifier, examples: Sequence[Example], embeddings: Floats | None
) -> list[Judgement]:
    """What each example is taken for; ``embeddings`` [n, dimensions], None for the cheap features alone."""
    return [
        classifier.judge(example.text, None if embeddings is None else embeddings[at])
        for at, example in enumerate(examples)
    ]


def report(examples: Sequence[Example], judgements: Sequence[Judgement]) -> Report:
    """Compare. Raises ConfigError if an example has an intent that the classifier does not know."""
    intents = sorted(judgements[0].probabilities)
    for example in examples:
        if example.intent not in intents:
            raise ConfigError(
                f"the classifier does not know the intent {example.intent}; it knows {', '.join(intents)}"
            )
    pairs = list(zip(examples, judgements, strict=True))
    right = np.array([example.intent == judgement.intent for example, judgement in pairs], dtype=float)
    confidence = np.array([judgement.confidence for judgement in judgements])
    truth = np.array([judgement.probabilities[example.intent] for example, judgement in pairs])
    scores = [_score(intent, pairs) for intent in intents]
    present = [score for score in scores if score.support]
    confused: dict[tuple[str, str], int] = {}
    for example, judgement in pairs:
        if example.intent != judgement.intent:
            pair = example.intent, judgement.intent
            confused[pair] = confused.get(pair, 0) + 1
    accuracy = float(right.mean())
    mae, baseline = _difficulty(pairs)
    return Report(
        examples=len(pairs),
        accuracy=accuracy,
        accuracy_se=(accuracy * (1 - accuracy) / len(pairs)) ** 0.5,
        macro_f1=sum(score.f1 for score in present) / len(present),
        ece=_ece(right, confidence),
        log_loss=float(-np.log(np.maximum(truth, 1e-12)).mean()),
        confidence=float(confidence.mean()),
        difficulty_mae=mae,
        difficulty_baseline=baseline,
        intents=scores,
        confused=[
            (*pair, count) for pair, count in sorted(confused.items(), key=lambda one: (-one[1], one[0]))
        ],
    )


def _score(intent: str, pairs: Sequence[tuple[Example, Judgement]]) -> IntentScore:
    support = sum(example.intent == intent for example, _ in pairs)
    said = sum(judgement.intent == intent for _, judgement in pairs)
    both = sum(example.intent == judgement.intent == intent for example, judgement in pairs)
    precision, recall = both / max(said, 1), both / max(support, 1)
    f1 = 2 * both / max(said + support, 1)
    return IntentScore(intent, precision, recall, f1, support)


def _ece(right: np.ndarray, confidence: np.ndarray) -> float:
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    out = 0.0
    for number in range(_BINS):
        inside = bins == number
        if inside.any():
            out += float(inside.mean() * abs(right[inside].mean() - confidence[inside].mean()))
    return out


def _difficulty(pairs: Sequence[tuple[Example, Judgement]]) -> tuple[float | None, float | None]:
    known = [
        (example.difficulty, judgement.difficulty)
        for example, judgement in pairs
        if example.difficulty is not None
    ]
    if not known:
        return None, None
    labels, said = np.array(known).T
    return float(np.abs(labels - said).mean()), float(np.abs(labels - labels.mean()).mean())
