"""How similar a question must be to a kept one to get its answer: learned for each kept question.

After vCache (Schroeder et al., "vCache: Verified Semantic Prompt Caching", 2025, arXiv:2502.03771): no
threshold fits all, so each kept question learns its own from observations (similarity, whether its answer
would have been right), by the model P(right) = sigmoid(steepness · (similarity - threshold)), and until that
is certain enough the upstream is asked anyway, which makes the next observation.

Two things differ. vCache fits every question alone and explores it until then; most questions come too
seldom for that, so here the questions of a tenant make a population: the distribution of (threshold,
steepness) over a grid, estimated from all observations by expectation-maximisation (the nonparametric maximum
likelihood of Kiefer and Wolfowitz, 1956), is what a question starts from, and its own observations move it on
from there. And the user's bound is on the share of wrong answers among those served, not among all requests,
so that nothing is served at odds worse than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_THRESHOLDS = np.linspace(0.60, 1.10, 21)  # one that is over 1 is never reached
_STEEPNESSES = np.array([15.0, 40.0, 100.0])
_GRID = [grid.ravel() for grid in np.meshgrid(_THRESHOLDS, _STEEPNESSES)]
_DOUBT = 2.0  # questions with nothing known of them that count into every population
_SWEEPS = 8
_UNFITTED_SHARE = 0.02  # of the questions: so many new observations and the population is estimated again


@dataclass(frozen=True, slots=True)
class Observation:
    """``right``: the answer of the question ``key`` would have been right at this similarity.

    ``loose``: as :func:`headrace.gateway.verifier.loose` says; these are another population.
    """

    key: bytes
    loose: bool
    similarity: float
    right: bool


Weights = npt.NDArray[np.float64]


class Population:
    """The questions of one tenant, of which at most ``most`` are remembered."""

    def __init__(self, observations: Sequence[Observation] = (), most: int = 2000) -> None:
        self._most = most
        self._logs: tuple[dict[bytes, Weights], dict[bytes, Weights]] = ({}, {})
        self._weights = [_prior(), _prior()]
        self._unfitted = [0, 0]
        for observation in observations:
            self._add(observation)
        for loose in (False, True):
            self._fit(loose)

    def observe(self, observation: Observation) -> None:
        """Learn from one."""
        self._add(observation)
        self._unfitted[observation.loose] += 1
        if self._unfitted[observation.loose] > len(self._logs[observation.loose]) * _UNFITTED_SHARE:
            self._fit(observation.loose)

    def probability(self, key: bytes, loose: bool, similarity: float) -> float:
        """That the answer of the question ``key`` is right for one that is so similar (cosine)."""
        weights = self._weights[loose]
        log = self._logs[loose].get(key)
        if log is not None:
            weights = weights * np.exp(log - log.max())
            weights = weights / weights.sum()
        return float(weights @ _right(similarity))

    def _add(self, observation: Observation) -> None:
        right = _right(observation.similarity)
        log = np.log(right if observation.right else 1 - right)
        logs = self._logs[observation.loose]
        before = logs.pop(observation.key, None)  # so that the one heard of last comes last
        logs[observation.key] = log if before is None else before + log
        if len(logs) > self._most:
            del logs[next(iter(logs))]

    def _fit(self, loose: bool) -> None:
        """Expectation-maximisation from the prior on, which stays a part of the population."""
        logs = self._logs[loose]
        self._unfitted[loose] = 0
        weights = prior = _prior()
        if logs:
            stacked = np.stack(list(logs.values()))
            likely = np.exp(stacked - stacked.max(axis=1, keepdims=True))
            for _ in range(_SWEEPS):
                each = likely * weights
                each /= each.sum(axis=1, keepdims=True)
                weights = (_DOUBT * prior + each.sum(axis=0)) / (_DOUBT + len(logs))
        self._weights[loose] = weights


def _prior() -> Weights:
    return np.full(len(_GRID[0]), 1.0 / len(_GRID[0]))


def _right(similarity: float) -> Weights:
    """P(right) at every point of the grid, never quite 0 or 1."""
    thresholds, steepnesses = _GRID
    right: Weights = np.clip(1 / (1 + np.exp(-steepnesses * (similarity - thresholds))), 1e-4, 1 - 1e-4)
    return right
