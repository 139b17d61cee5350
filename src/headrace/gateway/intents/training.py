"""Fitting a classifier: multinomial logistic regression with L2, how much of it chosen by cross-validation.

Folds keep groups whole. The predictions on the folds that were left out also give the temperature (Guo et
al., On Calibration of Modern Neural Networks, 2017), so that everything is learnt from the training part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.gateway.intents.classifier import ClassifierFile, Head, softmax, standardised
from headrace.gateway.intents.examples import Example, folds
from headrace.gateway.intents.features import NAMES, Floats, features

_FOLDS = 5
_PENALTIES = (0.003, 0.01, 0.03, 0.1)
_STEPS = 150
_LEAST_SCALE = 1e-3

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Fit:
    """Weights [inputs, outputs] and bias [outputs] over standardised inputs."""

    mean: Floats
    scale: Floats
    weights: Doubles
    bias: Doubles

    def logits(self, inputs: Floats) -> Doubles:
        return standardised(inputs, self.mean, self.scale).astype(np.float64) @ self.weights + self.bias


def train(examples: Sequence[Example], embeddings: Floats, embedder: str, *, seed: int = 0) -> ClassifierFile:
    """A classifier of ``examples``, whose ``embeddings`` are [n, dimensions] by the model ``embedder``.

    Raises ConfigError if there are too few examples to learn from.
    """
    intents = _intents(examples)
    cheap = np.stack([features(example.text) for example in examples])
    both = np.concatenate([cheap, embeddings], axis=1).astype(np.float32)
    number = {intent: at for at, intent in enumerate(intents)}
    wanted = np.eye(len(intents))[[number[example.intent] for example in examples]]
    fold = np.array(folds(examples, _FOLDS, seed))
    known = np.array([example.difficulty is not None for example in examples])
    hard = np.array([example.difficulty or 0.0 for example in examples])
    heads = [_head(inputs, wanted, known, hard, fold) for inputs in (both, cheap)]
    return ClassifierFile(
        embedder=embedder,
        dimensions=embeddings.shape[1],
        intents=intents,
        inputs=list(NAMES),
        with_embedding=heads[0],
        features_only=heads[1],
    )


def _intents(examples: Sequence[Example]) -> list[str]:
    groups: dict[str, set[str]] = {}
    for example in examples:
        groups.setdefault(example.intent, set()).add(example.group or example.text)
    if len(groups) < 2:
        raise ConfigError(f"examples of two intents at least are needed; all of these are {min(groups)}")
    for intent, found in groups.items():
        if len(found) < 2:
            raise ConfigError(f"intent {intent}: two examples of different groups at least are needed")
    return sorted(groups)


def _head(
    inputs: Floats, wanted: Doubles, known: npt.NDArray[np.bool_], hard: Doubles, fold: Doubles
) -> Head:
    penalty, logits = _validated(inputs, wanted, fold)
    fit = _fit(inputs, wanted, penalty)
    difficulty, bias = np.zeros(0), 0.0
    if known.any():  # a logistic regression onto a share is the same with two outputs
        two = np.stack([1 - hard[known], hard[known]], axis=1)
        of_two = _fit(inputs[known], two, penalty, like=fit)
        difficulty = of_two.weights[:, 1] - of_two.weights[:, 0]
        bias = float(of_two.bias[1] - of_two.bias[0])
    return Head(
        mean=_short(fit.mean),
        scale=_short(fit.scale),
        weights=[_short(row) for row in fit.weights],
        bias=_short(fit.bias),
        temperature=_temperature(logits, wanted),
        difficulty=_short(difficulty),
        difficulty_bias=bias,
    )


def _validated(inputs: Floats, wanted: Doubles, fold: Doubles) -> tuple[float, Doubles]:
    """The penalty with the least loss on folds that were left out, and the logits there."""
    found: list[tuple[float, float, Doubles]] = []
    for penalty in _PENALTIES:
        logits = np.zeros_like(wanted)
        for out in np.unique(fold):
            left = fold == out
            if left.all():  # a single group: there is nothing else to learn from
                return penalty, logits
            logits[left] = _fit(inputs[~left], wanted[~left], penalty).logits(inputs[left])
        found.append((_loss(logits, wanted), penalty, logits))
    _, penalty, logits = min(found, key=lambda one: one[0])
    return penalty, logits


def _fit(inputs: Floats, wanted: Doubles, penalty: float, like: _Fit | None = None) -> _Fit:
    """Minimise mean cross entropy to ``wanted`` [n, outputs] plus ``penalty`` / 2 of the squared weights.

    By Nesterov's accelerated gradient for strongly convex functions (Introductory Lectures on Convex
    Optimization, 2004, section 2.2), whose step follows from the largest curvature that the loss can have.
    ``like``: whose standardisation to take.
    """
    mean = inputs.mean(0) if like is None else like.mean
    scale = np.maximum(inputs.std(0), _LEAST_SCALE) if like is None else like.scale
    x = standardised(inputs, mean, scale).astype(np.float64)
    # softmax's own curvature is at most one half
    curvature = 0.5 * float(np.linalg.eigvalsh(x.T @ x)[-1]) / len(x) + penalty
    ratio = (penalty / curvature) ** 0.5
    momentum = (1 - ratio) / (1 + ratio)
    weights = ahead = np.zeros((x.shape[1], wanted.shape[1]))
    bias = bias_ahead = np.log(np.maximum(wanted.mean(0), 1e-6))
    for _ in range(_STEPS):
        off = (softmax(x @ ahead + bias_ahead) - wanted) / len(x)
        new = ahead - (x.T @ off + penalty * ahead) / curvature
        new_bias = bias_ahead - off.sum(0) / curvature
        ahead, bias_ahead = new + momentum * (new - weights), new_bias + momentum * (new_bias - bias)
        weights, bias = new, new_bias
    return _Fit(mean, scale, weights, bias)


def _loss(logits: Doubles, wanted: Doubles) -> float:
    return float(-(wanted * np.log(np.maximum(softmax(logits), 1e-12))).sum(1).mean())


def _temperature(logits: Doubles, wanted: Doubles) -> float:
    """What to divide logits by for the least loss: its loss has one minimum, which is cut in on."""
    low, high = np.log(0.05), np.log(20.0)
    for _ in range(60):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        if _loss(logits / np.exp(one), wanted) < _loss(logits / np.exp(other), wanted):
            high = other
        else:
            low = one
    return float(f"{np.exp((low + high) / 2):.5g}")


def _short(values: npt.NDArray[np.floating]) -> list[float]:
    """Five digits: as many as matter, and a file that can be read."""
    return [float(f"{value:.5g}") for value in values.tolist()]
