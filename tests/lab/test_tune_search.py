"""The search: what it tries, when it stops, what it keeps, and how its effects are computed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import optuna
import pytest

from headrace.errors import ConfigError, HeadraceError
from headrace.lab.tune.effects import additive, best_first
from headrace.lab.tune.measurement import GoOn, Measurement
from headrace.lab.tune.plot import front
from headrace.lab.tune.search import Search
from headrace.lab.tune.switches import (
    SWITCHES,
    Choice,
    Config,
    Dimension,
    Subject,
    Switch,
    changes,
    command_line,
    default_config,
    serve_options,
    space,
)
from tests.lab.tune_searching import DIMENSIONS, Silent, World

KNOWN = {
    "quantization": None,
    "threads": 0,
    "max-num-seqs": 32,
    "max-num-batched-tokens": 512,
    "speculative-config": None,
    "prefix-caching": True,
    "engine-process": False,
}
ON_8_CORES = Subject(options=KNOWN, cores=8, float_weights=True, users=16)


def labels(dimensions: list[Dimension]) -> dict[str, list[str]]:
    return {dimension.name: [choice.label for choice in dimension.choices] for dimension in dimensions}


def rough(config: Config) -> float:
    """A best point that single changes do not show: drafts pay only without the cache."""
    value = {"32": 100.0, "8": 90.0, "64": 104.0}[config["size"]]
    value *= 0.97 if config["cache"] == "off" else 1.0
    return value * (1.5 if config["drafts"] == "4" and config["cache"] == "off" else 1.0)


def test_candidates_depend_on_model_machine_and_load() -> None:
    found = labels(space(ON_8_CORES))
    assert found["threads"] == ["8 (all)", "7", "4", "2", "1"]
    assert found["quantization"] == ["as shipped", "int8", "int4"]
    assert found["max-num-seqs"] == ["32", "8", "4", "2"]  # more than 16 users never run at once
    many = labels(space(Subject(options=KNOWN, cores=1, float_weights=False, users=100)))
    assert "threads" not in many and "quantization" not in many
    assert many["max-num-seqs"] == ["32", "16", "8", "4", "64", "128"]
    rate = labels(space(Subject(options=KNOWN, cores=2, float_weights=False, users=None)))
    assert rate["max-num-seqs"] == ["32", "8", "16", "64", "128"]


def test_what_the_server_does_not_know_or_has_fixed_is_not_offered() -> None:
    fewer = {name: value for name, value in KNOWN.items() if name not in ("threads", "engine-process")}
    found = labels(space(Subject(options=fewer, cores=8, float_weights=True, users=16)))
    assert set(found) == set(KNOWN) - {"threads", "engine-process"}


def test_an_unknown_switch_and_an_empty_space_are_told() -> None:
    with pytest.raises(ConfigError, match="'thread' is no switch; did you mean threads"):
        space(ON_8_CORES, ["thread"])
    with pytest.raises(ConfigError, match="there are quantization, threads"):
        space(ON_8_CORES, ["xyz"])
    alone = Subject(options=KNOWN, cores=1, float_weights=False, users=16)
    with pytest.raises(ConfigError, match=r"nothing to search: quantization .*as shipped; threads .*1"):
        space(alone, ["threads", "quantization"])


def test_a_switch_that_joins_the_registry_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Switch(
        "kv-cache-dtype",
        ("kv-cache-dtype",),
        lambda subject: [Choice("auto"), Choice("int8", {"kv-cache-dtype": "int8"})],
    )
    monkeypatch.setattr("headrace.lab.tune.switches.SWITCHES", [*SWITCHES, entry])
    assert "kv-cache-dtype" not in labels(space(ON_8_CORES))  # this server has no such option
    later = Subject(options=KNOWN | {"kv-cache-dtype": "auto"}, cores=2, float_weights=False, users=8)
    dimensions = space(later)
    world = World(lambda config: 2.0 if config["kv-cache-dtype"] == "int8" else 1.0)
    search = world.search(dimensions)
    search.run(most=20)
    assert {config["kv-cache-dtype"] for config in world.asked} == {"auto", "int8"}
    assert search.best is not None
    assert command_line(serve_options(dimensions, search.best.config))[-2:] == ["--kv-cache-dtype", "int8"]


def test_options_of_a_configuration() -> None:
    dimensions = space(ON_8_CORES)
    assert serve_options(dimensions, default_config(dimensions)) == {}
    config = default_config(dimensions) | {
        "prefix-caching": "off",
        "engine-process": "process",
        "threads": "7",
    }
    arguments = ["--threads", "7", "--no-prefix-caching", "--engine-process"]
    assert command_line(serve_options(dimensions, config)) == arguments
    assert changes(dimensions, config) == "threads=7, prefix-caching=off, engine-process=process"


def test_each_choice_is_tried_within_the_best_so_far() -> None:
    """Of these, 64 is better than 32, and the cache's absence worse."""
    world = World(
        lambda config: {"32": 2.0, "8": 1.0, "64": 3.0}[config["size"]] - (config["cache"] == "off")
    )
    world.search().run(most=6)
    described = [changes(DIMENSIONS, config) for config in world.asked]
    assert described == [
        "defaults", "size=8", "size=64", "size=64, cache=off", "size=64, drafts=2", "size=64, drafts=4",
    ]  # fmt: skip


def test_nothing_is_measured_twice_and_the_search_ends_with_the_space() -> None:
    world = World(rough)
    search = world.search()
    search.run()
    assert len(world.asked) == search.size == 18
    assert len({tuple(config.items()) for config in world.asked}) == 18


@pytest.mark.parametrize("seed", range(4))
def test_what_only_two_switches_do_together_is_found(seed: int) -> None:
    search = World(rough).search(seed=seed)
    search.run(most=14)
    assert search.best is not None
    assert search.best.config == {"size": "64", "cache": "off", "drafts": "4"}


def test_a_poor_trial_ends_after_its_first_part_and_never_wins() -> None:
    world = World(lambda config: 10.0 if config["drafts"] == "2" else rough(config))
    search = world.search()
    search.run()
    poor = [t for t in search.trials if t.config["drafts"] == "2" and t.number > 4]
    assert poor and all(t.state == "pruned" and t.measurement and len(t.measurement.parts) == 1 for t in poor)
    assert search.trials[0].state == "measured"  # the defaults, whatever they do


def test_time_runs_out_with_some_left_for_what_comes_after() -> None:
    world = World(rough)  # 7 s a trial
    search = world.search()
    search.run(budget_s=60.0, afterwards=4)
    assert world.seconds <= 60 - 4 * 7 and len(search.trials) >= 4
    search.run(budget_s=60.0)
    assert 50 < world.seconds <= 60


class _Cut(BaseException):
    """As a signal would come."""


def test_a_search_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    storage = tmp_path / "study.db"
    world = World(rough)
    cut_at = 2

    def measure(config: Config, go_on: GoOn) -> Measurement:
        if len(world.asked) == cut_at:
            go_on(1, 50.0)
            raise _Cut
        return world.measure(config, go_on)

    search = Search(DIMENSIONS, measure, Silent(), storage=storage, clock=world.clock)
    with pytest.raises(_Cut):
        search.run()
    assert len(search.trials) == cut_at
    again = world.search(storage=storage)
    assert again.trials == search.trials and again.spent_s == search.spent_s
    again.run(most=5)
    assert [changes(DIMENSIONS, trial.config) for trial in again.trials] == [
        "defaults", "size=8", "size=64", "size=64, cache=off", "size=64, drafts=2",
    ]  # fmt: skip
    assert len(world.asked) == 5 and [trial.number for trial in again.trials] == list(range(5))
    assert world.search(storage=storage).trials == again.trials


def test_a_trial_that_was_chosen_and_not_begun_is_chosen_again(tmp_path: Path) -> None:
    """Killed between optuna's two steps, the search could not be opened any more."""
    world = World(rough)
    world.search(storage=tmp_path / "study.db").run(most=1)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.enqueue_trial(default_config(DIMENSIONS) | {"size": "8"})
    world.search(storage=tmp_path / "study.db").run(most=3)
    assert [changes(DIMENSIONS, config) for config in world.asked] == ["defaults", "size=8", "size=64"]


def test_time_that_was_spent_before_counts(tmp_path: Path) -> None:
    world = World(rough)
    world.search(storage=tmp_path / "study.db").run(budget_s=30)
    spent, tried = world.seconds, len(world.asked)
    world.search(storage=tmp_path / "study.db").run(budget_s=30)
    assert (world.seconds, len(world.asked)) == (spent, tried)


def test_a_storage_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"study\.db holds no search"):
        World(rough).search(storage=tmp_path / "study.db")


def test_what_cannot_be_served_is_kept_and_not_tried_again() -> None:
    world = World(rough)

    def measure(config: Config, go_on: GoOn) -> Measurement:
        if config["size"] == "64":
            world.asked.append(config)
            raise HeadraceError("does not fit")
        return world.measure(config, go_on)

    search = Search(DIMENSIONS, measure, Silent(), clock=world.clock)
    search.run()
    failed = [trial for trial in search.trials if trial.state == "failed"]
    assert [trial.error for trial in failed] == ["does not fit"] * len(failed) != []
    assert len({tuple(config.items()) for config in world.asked}) == len(world.asked) == 12 + len(failed)
    assert search.best is not None and search.best.config["size"] != "64"


def test_defaults_that_cannot_be_served_end_the_search() -> None:
    def measure(config: Config, go_on: GoOn) -> Measurement:
        raise HeadraceError("no such model")

    with pytest.raises(HeadraceError, match="no such model"):
        Search(DIMENSIONS, measure, Silent()).run()


def test_effects_are_those_of_least_squares() -> None:
    """Against numpy's solver and the textbook's standard errors, on a noisy additive truth."""
    rng = np.random.default_rng(3)
    grid = [
        dict(zip([d.name for d in DIMENSIONS], point, strict=True))
        for point in itertools.product(*([c.label for c in d.choices] for d in DIMENSIONS))
    ]
    truth = {("size", "8"): -0.3, ("size", "64"): 0.1, ("cache", "off"): 0.05, ("drafts", "2"): 0.2}
    values = [
        1.0 + sum(truth.get(pair, 0.0) for pair in config.items()) + 0.01 * float(rng.standard_normal())
        for config in grid
    ]
    found = {(e.switch, e.label): e for e in additive(DIMENSIONS, grid, values)}
    assert len(found) == 5
    for pair, effect in found.items():
        assert effect.se is not None and effect.trials == (9 if pair[0] == "cache" else 6)
        assert abs(effect.size - truth.get(pair, 0.0)) < 4 * effect.se
    columns = [np.ones(18)] + [np.array([float(c[n] == v) for c in grid]) for n, v in found]
    design = np.column_stack(columns)
    sizes, rest, *_ = np.linalg.lstsq(design, np.array(values), rcond=None)
    errors = np.sqrt(rest[0] / (18 - 6) * np.diag(np.linalg.inv(design.T @ design)))
    assert [e.size for e in found.values()] == pytest.approx(list(sizes[1:]))
    assert [e.se for e in found.values()] == pytest.approx(list(errors[1:]))


def test_effects_of_as_many_trials_as_choices_have_no_error() -> None:
    configs = [default_config(DIMENSIONS), default_config(DIMENSIONS) | {"cache": "off"}]
    [effect] = additive(DIMENSIONS, configs, [1.0, 1.5])
    assert (effect.label, effect.se, effect.trials) == ("off", None, 1)
    assert effect.size == pytest.approx(0.5)


def test_sums_come_best_first_and_whole() -> None:
    world = World(lambda config: math.exp(len(config["drafts"]) - len(config["size"])))
    search = world.search()
    search.run(most=6)
    effects = additive(DIMENSIONS, world.asked, [math.log(world.value(c)) for c in world.asked])
    known = {(e.switch, e.label): e.size for e in effects}
    sums = [sum(known.get(pair, 0.0) for pair in c.items()) for c in best_first(DIMENSIONS, effects)]
    assert len(sums) == 18 and sums == sorted(sums, reverse=True)


def test_the_front_is_what_nothing_beats() -> None:
    points = [(100.0, 5.0), (120.0, 9.0), (90.0, 6.0), (120.0, 8.0), (80.0, 2.0), (110.0, 8.5)]
    assert front(points) == [4, 0, 3]
