"""The load and its numbers, against servers whose speed is known."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.lab.bench import load as load_module
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.records import Record
from headrace.lab.bench.server_names import parse_metrics
from headrace.lab.bench.server_watch import summarise
from headrace.lab.bench.slo import parse_slo
from tests.lab.measuring import Quiet, bench, running, small_headrace
from tests.lab.streaming_server import Exchange, Streamer


def one_at_a_time(seconds: float) -> Streamer:
    """A server that answers one request every ``seconds``, also if the next one comes a little late."""
    streamer, lock = Streamer(), asyncio.Lock()

    async def serve(exchange: Exchange) -> None:
        async with lock:
            await asyncio.sleep(seconds - asyncio.get_running_loop().time() % seconds)
            await streamer.decent(exchange)

    streamer.behaviour = serve
    return streamer


def test_times_are_those_of_the_server() -> None:
    with running(Streamer(first_s=0.1, gap_s=0.02)) as address:
        [stage] = bench(address, requests=10, levels=(2,)).stages
    assert stage.ttft and stage.tpot and stage.itl and stage.e2e
    best = min(stage.records, key=lambda record: record.e2e_s)  # whom a busy machine held up least
    assert best.ttft_s is not None and best.tpot_s is not None
    assert 0.1 <= best.ttft_s < 0.16 and best.tpot_s < 0.03 and 0.24 <= best.e2e_s < 0.36
    assert best.ttft_s + 7 * best.tpot_s >= 0.239  # a first token that is seen late is nearer to the others
    assert stage.ttft.p50 >= 100 and stage.tpot.p50 >= 19 and stage.e2e.p50 >= 240
    assert stage.itl.count == 10 * 7 and stage.itl.p50 >= 15
    assert stage.ttft.p50 <= stage.ttft.p90 <= stage.ttft.p95 <= stage.ttft.p99 <= stage.ttft.max * 1.01
    low, high = stage.e2e.ci["p50"]
    assert low <= stage.e2e.p50 * 1.001 and high >= stage.e2e.p50 * 0.999


def test_a_closed_loop_keeps_its_users_and_counts_tokens_of_the_window() -> None:
    streamer = Streamer(first_s=0.05, gap_s=0.01)
    most = []
    with running(streamer) as address:
        view = Quiet(lambda load: most.append(load.in_flight))
        [stage] = bench(address, view, requests=None, duration_s=1.5, warmup_s=0.3, levels=(4,)).stages
    assert max(most) == 4
    assert stage.window == "steady" and stage.window_s == pytest.approx(1.5)
    assert stage.warmup_requests >= 4 and all(r.index < 0 for r in stage.records if r.warmup)
    # 8 tokens take 50 + 7 × 10 ms: four users make at most 267 tokens/s
    assert 0 < stage.output_throughput.value <= 290
    assert stage.output_throughput.low <= stage.output_throughput.value <= stage.output_throughput.high
    # of an answer that began or ended outside, only the tokens of the window count
    edges = 4 * 8 / stage.window_s
    assert stage.request_throughput.value * 8 == pytest.approx(stage.output_throughput.value, abs=edges)
    assert sorted(r.index for r in stage.records if r.counts) == list(range(stage.requests))


def test_an_open_loop_waits_for_nobody() -> None:
    """Coordinated omission: a client that waits for a stalled server would see one slow request, not all."""
    with running(one_at_a_time(0.1)) as address:
        [stage] = bench(address, kind="open", levels=(20,), arrivals="uniform", requests=20).stages
    assert stage.completed == 20
    waits = sorted((r.ttft_s or 0) for r in stage.records)
    # each arrives 50 ms after the one before and takes 100 ms: the last has waited for about a second
    assert waits[-1] > 0.8 and waits[-1] - waits[0] > 0.5
    assert stage.saturated
    assert stage.send_lag is not None and stage.send_lag.p50 < 1000 * waits[-1] / 4


def test_arrivals_are_repeatable_and_not_rescaled() -> None:
    with running(Streamer()) as address:
        runs = [
            bench(address, kind="open", levels=(60,), requests=None, duration_s=0.8, seed=seed).stages[0]
            for seed in (5, 5, 6)
        ]
    times = [[r.scheduled_s for r in sorted(stage.records, key=lambda r: r.index)] for stage in runs]
    assert times[0] == times[1] != times[2]
    assert runs[0].label == "60 req/s poisson"


def test_a_sweep_of_rates_ends_at_saturation() -> None:
    with running(one_at_a_time(0.05)) as address:
        stages = bench(
            address, kind="open", levels=(4, 60, 80), arrivals="uniform", requests=None, duration_s=0.8
        ).stages
    assert [s.saturated for s in stages] == [False, True]


def test_a_sweep_of_users_ends_when_throughput_does() -> None:
    with running(one_at_a_time(0.03)) as address:
        options = {"requests": None, "duration_s": 0.5, "warmup_s": 0.1}
        early = bench(address, levels=(1, 2, 4, 8, 16), **options)
        late = bench(address, levels=(1, 2, 4), early_stop=False, **options)
    assert len(early.stages) < 5
    assert len(late.stages) == 3
    assert late.knee == "1 user"


def test_what_piles_up_is_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_OUTSTANDING", 10)

    streamer = Streamer()

    async def swallow(exchange: Exchange) -> None:
        await (streamer.decent(exchange) if len(streamer.asked) <= 3 else asyncio.sleep(60))

    streamer.behaviour = swallow
    with running(streamer) as address:
        began = time.monotonic()
        [stage] = bench(address, kind="open", levels=(50,), requests=100).stages
    assert time.monotonic() - began < 50
    assert stage.saturated and stage.errors == {"abandoned": stage.requests} and stage.requests >= 10


def test_a_server_that_refuses_everything_ends_the_stage() -> None:
    streamer = Streamer()

    async def refuse(exchange: Exchange) -> None:
        await (streamer.decent(exchange) if len(streamer.asked) <= 3 else exchange.error(503, "full"))

    streamer.behaviour = refuse
    with running(streamer) as address:
        result = bench(address, levels=(10, 20), requests=None, duration_s=30.0)
    [stage] = result.stages
    assert 50 <= stage.requests < 100 and stage.completed == 0 and stage.e2e is None


def test_an_interrupted_run_keeps_what_it_measured() -> None:
    holder: list[Load] = []

    def stop(load: Load) -> None:
        holder.append(load)
        if load.done >= 4:
            load.interrupt()

    with running(Streamer(first_s=0.2)) as address:
        began = time.monotonic()
        [stage] = bench(address, Quiet(stop), levels=(2,), requests=None, duration_s=60.0).stages
    assert time.monotonic() - began < 50
    assert stage.completed >= 4 and stage.errors == {}
    assert stage.interrupted_requests == sum(r.error == "interrupted" for r in stage.records)


def test_conversations_carry_the_answers_before() -> None:
    streamer = Streamer()
    with running(streamer) as address:
        [stage] = bench(address, levels=(1,), turns=3, requests=6).stages
    assert stage.requests == 6
    last = [e.body["messages"] for e in streamer.asked[-3:]]
    assert [len(messages) for messages in last] == [1, 3, 5]
    assert last[2][1] == {"role": "assistant", "content": "word " * 8}
    assert last[2][:3] == last[1]


def test_the_highest_good_rate_is_found() -> None:
    with running(one_at_a_time(0.05)) as address:  # 20 a second at the very most
        result = bench(
            address,
            kind="open",
            find_rate=True,
            levels=(5,),
            arrivals="uniform",
            requests=None,
            duration_s=0.8,
            slo=parse_slo("e2e=500ms"),
        )
    assert result.best_rate is not None and 4 <= result.best_rate < 40
    rates = [stage.level for stage in result.stages]
    assert max(rates) > result.best_rate
    assert result.slo is not None


def test_our_own_server_tells_its_side() -> None:
    with small_headrace(step_s=0.005) as address:
        options = {"prompt_tokens": Lengths("fixed", 200), "shared_prefix": 0.9}
        [stage] = bench(address, levels=(4,), requests=None, duration_s=2.0, **options).stages
    server = stage.server
    assert server is not None
    assert server.running_mean is not None and 0 < server.running_mean <= 4
    assert server.kv_usage_max is not None and 0 < server.kv_usage_max < 1
    assert server.busy is not None and 0.2 < server.busy <= 1
    assert server.tokens_per_step is not None and server.tokens_per_step > 1
    assert server.queue_time_mean_ms is not None and server.queue_time_mean_ms < 1000
    assert stage.cached_share is not None and stage.cached_share > 0.5
    assert server.prefix_hit_share is not None and server.prefix_hit_share > 0.5


def test_metrics_of_vllm_are_read() -> None:
    page = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 2.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m, {odd}"} 0.25\n'
        'vllm:request_queue_time_seconds_sum{model_name="m"} %s\n'
        'vllm:request_queue_time_seconds_count{model_name="m"} %s\n'
        'vllm:request_queue_time_seconds_bucket{le="1"} 9\n'
        "process_cpu_seconds_total %s\n"
        "vllm:broken{ NaN of nothing\nother 3\n"
    )
    pages = [parse_metrics(page % values) for values in ((1, 10, 5), (2, 15, 6), (3, 20, 9))]
    stats = summarise([(0.0, pages[0]), (1.0, pages[1]), (2.0, pages[2])])
    assert (stats.running_mean, stats.kv_usage_max) == (5.0, 0.25)
    assert stats.queue_time_mean_ms == pytest.approx(200)
    assert stats.cpu_cores == pytest.approx(2)
    assert stats.waiting_mean is None and stats.busy is None


def test_definitions() -> None:
    record = Record(index=0, scheduled_s=1.0, sent_s=1.5, end_s=4.0, chunk_s=[2.0, 3.0, 4.0], output_tokens=5)
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.itl_s) == (1.0, 3.0, 0.5, [1.0, 1.0])
    slo = parse_slo("ttft=1s,tpot=500ms,e2e=3s")
    assert slo.met_by(record)
    assert not parse_slo("tpot=499ms").met_by(record)
    record.error = "timeout"
    assert not slo.met_by(record)
