"""Which configuration to try next, and when a trial has shown enough: optuna's TPE, pruner and storage.

The order: the defaults; every other choice once, switch by switch, the rest as in the best configuration so
far (coordinate descent); then in turn the best sum of what single choices brought (an additive fit over all
trials) and what TPE proposes (Bergstra et al. 2011, multivariate), which sees interactions. Nothing is tried
twice. A trial whose value after a part is below the median of the finished ones at that part ends there (the
median rule of Golovin et al. 2017, "Google Vizier").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.errors import ConfigError, HeadraceError
from headrace.lab.tune.effects import Effect, additive, best_first
from headrace.lab.tune.measurement import Measure, Measurement, Trial
from headrace.lab.tune.switches import Config, Dimension, default_config

if TYPE_CHECKING:
    import optuna

_NAME = "tune"
_FEW = 3  # finished trials before the median of them ends any
_ASKS = 16  # proposals of TPE that were tried already, before another way is taken
_FLOOR = 0.02  # of the best value: how far below it a value that is nearly none counts


class View(Protocol):
    """Somebody who watches."""

    def started(self, number: int, config: Config) -> None:
        """A trial begins."""

    def finished(self, trial: Trial, best: Trial | None) -> None:
        """A trial is over; ``best`` of all so far."""


class Search:
    """A search that goes on where its storage ends.

    ``storage``: an SQLite file, None for memory. ``clock``: seconds, by which a budget is counted; what
    earlier runs of the same storage spent counts as well.
    """

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        measure: Measure,
        view: View,
        *,
        storage: Path | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dimensions = list(dimensions)
        self.trials: list[Trial] = []
        self._measure = measure
        self._view = view
        self._clock = clock
        self._defaults = default_config(self.dimensions)
        self._study = self._open(storage, seed)
        self._by_sum = False
        self._load()

    def run(self, budget_s: float | None = None, most: int | None = None, *, afterwards: int = 0) -> None:
        """Try until time, trials (``most`` in all) or configurations run out; time for ``afterwards`` more
        trials is left over.

        Raises HeadraceError if the defaults fail, and what ``measure`` raises; then what is finished stays.
        """
        begin = self._clock() - self.spent_s
        while most is None or len(self.trials) < most:
            if (
                budget_s is not None
                and self._clock() - begin + (1 + afterwards) * self._longest_s() > budget_s
            ):
                return
            trial = self._propose()
            if trial is None:
                return
            self._try(trial)

    @property
    def spent_s(self) -> float:
        """Of all trials, earlier runs' included."""
        return sum(trial.measurement.seconds for trial in self.trials if trial.measurement is not None)

    @property
    def best(self) -> Trial | None:
        """The trial of the highest value among those that were measured whole."""
        whole = [t for t in self.trials if t.state == "measured" and t.measurement is not None]
        return max(whole, key=_rank, default=None)

    @property
    def size(self) -> int:
        """Configurations in the space."""
        return math.prod(len(dimension.choices) for dimension in self.dimensions)

    def _open(self, storage: Path | None, seed: int) -> optuna.Study:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        alone = sum(len(dimension.choices) - 1 for dimension in self.dimensions)
        url = None if storage is None else f"sqlite:///{storage}"
        try:
            study = optuna.create_study(
                study_name=_NAME,
                storage=url,
                load_if_exists=True,
                direction="maximize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=_FEW, n_warmup_steps=0),
            )
        except SQLAlchemyError as error:
            said = str(error).splitlines()[0]
            raise ConfigError(f"{storage} holds no search ({said}): start afresh with --overwrite") from None
        done = len(study.get_trials(deepcopy=False))  # so that it does not draw the same again
        study.sampler = optuna.samplers.TPESampler(
            seed=seed + done, multivariate=True, n_startup_trials=1 + alone, constant_liar=False
        )
        return study

    def _load(self) -> None:
        """What the storage holds; a trial that was cut off is as if it had never been."""
        from optuna.trial import TrialState

        for frozen in self._study.get_trials(deepcopy=False):
            if frozen.state == TrialState.WAITING:  # the next to be asked for
                self._study.tell(self._study.ask(), state=TrialState.FAIL)
            elif frozen.state == TrialState.RUNNING:
                self._study.tell(frozen.number, state=TrialState.FAIL)
            elif "trial" in frozen.user_attrs:
                self.trials.append(msgspec.convert(frozen.user_attrs["trial"], Trial))

    def _longest_s(self) -> float:
        """What the next trial may take: as long as the longest so far."""
        return max((t.measurement.seconds for t in self.trials if t.measurement is not None), default=0.0)

    def _propose(self) -> optuna.trial.Trial | None:
        """The next trial; None when every configuration was tried."""
        tried = {_key(trial.config) for trial in self.trials}
        if (config := self._untested()) is not None:
            return self._asked(config)
        if len(tried) >= self.size:
            return None
        self._by_sum = not self._by_sum
        if not self._by_sum and (trial := self._by_tpe(tried)) is not None:
            return trial
        for combined in best_first(self.dimensions, self._effects()):
            if _key(combined) not in tried:
                return self._asked(combined)
        return self._by_tpe(tried)

    def _untested(self) -> Config | None:
        """The next choice that no trial had yet, within the best configuration so far; the defaults first."""
        if self.best is None:
            return self._defaults
        for dimension in self.dimensions:
            had = {trial.config[dimension.name] for trial in self.trials}
            for choice in dimension.choices:
                if choice.label not in had:
                    return self.best.config | {dimension.name: choice.label}
        return None

    def _effects(self) -> list[Effect]:
        found = [t for t in self.trials if t.measurement is not None]
        best = max((t.measurement.parts[-1] for t in found if t.measurement is not None), default=0.0) or 1.0
        values = [
            math.log(t.measurement.parts[-1] / best + _FLOOR) for t in found if t.measurement is not None
        ]
        return additive(self.dimensions, [trial.config for trial in found], values)

    def _asked(self, config: Config) -> optuna.trial.Trial:
        self._study.enqueue_trial(config)
        trial = self._study.ask()
        self._suggest(trial)
        return trial

    def _by_tpe(self, tried: set[tuple[str, ...]]) -> optuna.trial.Trial | None:
        from optuna.trial import TrialState

        for _ in range(_ASKS):
            trial = self._study.ask()
            if _key(self._suggest(trial)) not in tried:
                return trial
            self._study.tell(trial, state=TrialState.FAIL)
        return None

    def _suggest(self, trial: optuna.trial.Trial) -> Config:
        return {
            dimension.name: trial.suggest_categorical(
                dimension.name, [choice.label for choice in dimension.choices]
            )
            for dimension in self.dimensions
        }

    def _try(self, trial: optuna.trial.Trial) -> None:
        from optuna.trial import TrialState

        config: Config = dict(trial.params)
        number = len(self.trials)

        def go_on(part: int, value: float) -> bool:
            trial.report(value, part)
            return config == self._defaults or not trial.should_prune()

        self._view.started(number, config)
        try:
            measured = self._measure(config, go_on)
        except HeadraceError as error:
            if config == self._defaults:
                raise
            done = Trial(number=number, config=config, state="failed", error=error.message)
            self._keep(trial, done, TrialState.FAIL)
            return
        except BaseException:
            self._study.tell(trial, state=TrialState.FAIL)
            raise
        state = TrialState.COMPLETE if measured.whole else TrialState.PRUNED
        done = Trial(
            number=number,
            config=config,
            state="measured" if measured.whole else "pruned",
            measurement=measured,
        )
        self._keep(trial, done, state)

    def _keep(self, trial: optuna.trial.Trial, done: Trial, state: Any) -> None:
        trial.set_user_attr("trial", msgspec.to_builtins(done))
        value = done.measurement.value if done.state == "measured" and done.measurement is not None else None
        self._study.tell(trial, value, state=state)
        self.trials.append(done)
        self._view.finished(done, self.best)


def _key(config: Config) -> tuple[str, ...]:
    return tuple(config[name] for name in sorted(config))


def _rank(trial: Trial) -> tuple[float, float]:
    """By value; where nothing meets the SLO, by throughput."""
    assert isinstance(trial.measurement, Measurement)
    return trial.measurement.value, trial.measurement.throughput
