"""From the requests of a stage to the numbers of its row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from headrace.lab.bench import bootstrap
from headrace.lab.bench.client_watch import ClientStats
from headrace.lab.bench.records import INTERRUPTED, Record
from headrace.lab.bench.server_watch import ServerStats
from headrace.lab.bench.slices import completion_rates, edges, token_rates
from headrace.lab.bench.slo import SLO

if TYPE_CHECKING:
    from headrace.lab.bench.load import Load

_US = 1_000_000
_HOUR_US = 3600 * _US
PERCENTS = (50, 90, 95, 99)


class Estimate(msgspec.Struct):
    """A value and its 95% interval, by resampling: throughput from slices of time, shares from requests."""

    value: float
    low: float
    high: float


class Distribution(msgspec.Struct, kw_only=True):
    """Times in milliseconds. ``ci``: 95% intervals of mean, p50, p90, p95, p99 (``[low, high]``); empty if
    single values are not independent. ``histogram``: all values in microseconds, in HdrHistogram's encoding.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    ci: dict[str, tuple[float, float]]
    histogram: str


class StageResult(msgspec.Struct, kw_only=True):
    """All that is known of one stage. Throughput is of the window alone; a rate is per second."""

    label: str
    kind: Literal["closed", "open"]
    level: float
    window: Literal["steady", "whole"]
    window_begin_s: float
    window_s: float
    requests: int
    completed: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    warmup_requests: int
    interrupted_requests: int
    saturated: bool
    token_source: str
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    cached_share: float | None
    request_throughput: Estimate
    output_throughput: Estimate
    prompt_throughput: float | None
    goodput: Estimate | None
    slo_attainment: Estimate | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    send_lag: Distribution | None
    client: ClientStats
    server: ServerStats | None
    records: list[Record]


def summarise(
    load: Load, slo: SLO | None, client: ClientStats, server: ServerStats | None, *, seed: int = 0
) -> StageResult:
    """The result of a stage that has run."""
    rng = np.random.default_rng((seed, load.stage.number, 2))
    counted = [record for record in load.records if record.counts]
    answered = [record for record in counted if record.ok]
    begin, end = load.begin_s, load.end_s
    window_s = end - begin
    # Throughput takes the window as it is: what runs at its ends counts with the part that lies inside.
    bounds = edges(begin, end)
    met = np.asarray([slo.met_by(record) for record in counted] if slo else [], np.float64)
    prompts = [r.prompt_tokens for r in answered if r.prompt_tokens is not None]
    cached = [
        r.cached_tokens for r in answered if r.cached_tokens is not None and r.prompt_tokens is not None
    ]
    outputs = [r.output_tokens for r in answered if r.output_tokens is not None]
    failures = [record for record in counted if not record.ok]
    steady = load.stage.requests is None and not load.stage.times
    return StageResult(
        label=load.stage.label,
        kind=load.stage.kind,
        level=load.stage.level,
        window="steady" if steady else "whole",
        window_begin_s=round(begin, 6),
        window_s=round(window_s, 6),
        requests=len(counted),
        completed=len(answered),
        errors=dict(Counter(record.error or "" for record in failures)),
        error_examples={record.error or "": record.detail for record in reversed(failures)},
        warmup_requests=sum(record.warmup for record in load.records),
        interrupted_requests=sum(r.error == INTERRUPTED and not r.warmup for r in load.records),
        saturated=load.saturated or _falling_behind(load),
        token_source=", ".join(sorted({r.token_source for r in answered})) or "usage",
        prompt_tokens_mean=round(sum(prompts) / len(prompts), 2) if prompts else None,
        output_tokens_mean=round(sum(outputs) / len(outputs), 2) if outputs else None,
        cached_share=round(sum(cached) / max(sum(prompts), 1), 4) if cached else None,
        request_throughput=_mean(completion_rates(load.records, bounds), rng),
        output_throughput=_mean(token_rates(load.records, bounds), rng),
        prompt_throughput=round(sum(prompts) / window_s, 3) if prompts else None,
        goodput=_mean(met, rng, len(met) / window_s) if slo else None,
        slo_attainment=_mean(met, rng) if slo else None,
        ttft=distribution((r.ttft_s for r in answered), rng),
        tpot=distribution((r.tpot_s for r in answered), rng),
        itl=distribution((gap for r in answered for gap in r.itl_s), None),
        e2e=distribution((r.e2e_s for r in answered), rng),
        send_lag=distribution((r.sent_s - r.scheduled_s for r in counted if r.turn == 0), None),
        client=client,
        server=server,
        records=load.records,
    )


def _falling_behind(load: Load) -> bool:
    """An open loop whose server finishes less than nine tenths of what arrives, with the rest piling up."""
    if load.stage.kind == "closed":
        return False
    begin = load.begin_s
    end = min(load.end_s, max((r.scheduled_s for r in load.records), default=begin))
    middle = (begin + end) / 2
    arrived = sum(begin <= r.scheduled_s <= end for r in load.records)
    ended = sum(begin <= r.end_s < end for r in load.records)

    def open_at(time: float) -> int:
        return sum(r.scheduled_s < time <= r.end_s for r in load.records)

    return arrived >= 20 and ended < 0.9 * arrived and open_at(end) > 1.2 * open_at(middle) + 2


def _mean(values: bootstrap.Array, rng: np.random.Generator, scale: float = 1.0) -> Estimate:
    if not len(values):
        return Estimate(0.0, 0.0, 0.0)
    low, high = bootstrap.interval(bootstrap.resampled(values, bootstrap.mean, rng))
    return Estimate(*(round(scale * value, 4) for value in (float(values.mean()), low, high)))


def distribution(seconds: Iterable[float | None], rng: np.random.Generator | None) -> Distribution | None:
    """Percentiles of ``seconds`` (None left out) by HdrHistogram, to three digits; None if there are none.

    ``rng`` draws the intervals; without it there are none.
    """
    from hdrh.histogram import HdrHistogram

    values = np.asarray([value for value in seconds if value is not None])
    if not len(values):
        return None
    histogram = HdrHistogram(1, _HOUR_US, 3)
    for value in np.clip(np.rint(values * _US), 1, _HOUR_US).astype(np.int64).tolist():
        histogram.record_value(value)
    at = {f"p{percent}": histogram.get_value_at_percentile(percent) / 1000 for percent in PERCENTS}
    ci: dict[str, tuple[float, float]] = {}
    if rng is not None:
        statistics = {"mean": bootstrap.mean, **{f"p{p}": bootstrap.percentile(p) for p in PERCENTS}}
        for name, statistic in statistics.items():
            low, high = bootstrap.interval(bootstrap.resampled(values * 1000, statistic, rng))
            ci[name] = (round(low, 3), round(high, 3))
    return Distribution(
        count=len(values),
        mean=round(float(values.mean()) * 1000, 4),
        **at,
        max=round(float(values.max()) * 1000, 3),
        ci=ci,
        histogram=histogram.encode().decode(),
    )
