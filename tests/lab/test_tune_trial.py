"""One trial: what it says of itself while it runs, how it is ended, and the comparison at the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headrace.lab.bench.load import Load, Stage
from headrace.lab.bench.records import Record
from headrace.lab.bench.result import Result
from headrace.lab.bench.session import Plan
from headrace.lab.bench.slo import SLO
from headrace.lab.tune.confirm import confirmed, interleaved
from headrace.lab.tune.trial import Watch, goodput_so_far, throughput_so_far
from tests.lab.measuring import Quiet, bench, running
from tests.lab.streaming_server import Streamer


def load_of(*records: Record) -> Load:
    """A load whose window began at 1 s, with these requests."""
    nobody: Any = None
    load = Load(nobody, nobody, nobody, Stage(kind="closed", level=2, number=0, warmup_s=1.0))
    load.records = list(records)
    return load


def test_tokens_under_way_count_as_chunks_did_so_far() -> None:
    done = Record(index=0, sent_s=0.5, end_s=3.0, chunk_s=[1.0, 2.0, 3.0], output_tokens=12)
    under_way = Record(index=1, sent_s=2.0, chunk_s=[0.9, 3.5, 4.0])
    failed = Record(index=2, sent_s=2.0, end_s=4.0, chunk_s=[3.0], error="timeout")
    # 12 tokens, and two chunks inside of the window with four tokens each, in 4 seconds
    assert throughput_so_far(load_of(done, under_way, failed), 5.0) == pytest.approx((12 + 2 * 4) / 4)
    assert throughput_so_far(load_of(Record(index=0)), 5.0) == 0


def test_goodput_so_far_is_of_requests_that_ended_and_met_the_slo() -> None:
    quick = Record(index=0, scheduled_s=1.0, end_s=2.0, chunk_s=[1.2], output_tokens=4)
    slow = Record(index=1, scheduled_s=1.0, end_s=4.0, chunk_s=[3.9], output_tokens=4)
    before = Record(index=-1, scheduled_s=0.1, end_s=0.9, chunk_s=[0.2], output_tokens=4)
    under_way = Record(index=2, scheduled_s=2.0, chunk_s=[2.1])
    load = load_of(quick, slow, before, under_way)
    assert goodput_so_far(load, SLO(ttft_ms=500), 5.0) == pytest.approx(1 / 4)


def test_a_trial_ends_where_it_is_told_to_and_no_request_counts_as_failed() -> None:
    told: list[tuple[int, float]] = []

    def go_on(part: int, value: float) -> bool:
        told.append((part, value))
        return part < 2

    plan = Plan(kind="closed", levels=(2,), duration_s=3.0, warmup_s=0.0)
    watch = Watch(plan, go_on, Quiet())
    streamer = Streamer(gap_s=0.01)
    with running(streamer) as address:
        view: Any = watch
        result = bench(address, view, duration_s=3.0, requests=None)
    [stage] = result.stages
    assert [part for part, _ in told] == [1, 2] and not result.interrupted
    assert watch.ended is not None and watch.ended[0] == told[1][1] > 0
    assert stage.window_s < 3.0 and stage.errors == {} and stage.completed > 0


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Two measurements each of a slow and of a fast server."""
    found: dict[str, list[Result]] = {}
    for name, gap_s in (("slow", 0.02), ("fast", 0.005)):
        with running(Streamer(first_s=gap_s, gap_s=gap_s)) as address:
            found[name] = [bench(address, requests=16, seed=seed) for seed in range(2)]
    return found


def compared(defaults: list[Result], best: list[Result]) -> tuple[list[str], Result, Result]:
    """The runs in the order in which they were asked for, and both sides."""
    order: list[str] = []
    waiting = copy.deepcopy({"defaults": defaults, "best": best})

    def measure(config: dict[str, str], seed: int) -> Result:
        order.append(f"{config['x']} {seed}")
        return waiting[config["x"]].pop(0)

    before, after = interleaved({"x": "best"}, {"x": "defaults"}, measure, lambda what: None)
    return order, before, after


def test_the_winner_is_measured_again_in_turns(results: dict[str, list[Result]]) -> None:
    order, before, after = compared(results["slow"], results["fast"])
    assert order == ["defaults 1", "best 1", "defaults 2", "best 2"]
    assert [stage.label for stage in after.stages] == ["2 users, pair 1", "2 users, pair 2"]
    found = confirmed({"x": "best"}, before, after)
    assert found.gain is not None and found.better
    assert found.gain.low < found.gain.value < found.gain.high and found.gain.value > 1.5
    assert len(found.pairs) == 2 and min(found.pairs) > 1.2


def test_what_is_no_better_is_not_called_better(results: dict[str, list[Result]]) -> None:
    _, before, after = compared(results["fast"], results["slow"])
    found = confirmed({"x": "best"}, before, after)
    assert found.gain is not None and found.gain.high < 1 and not found.better
