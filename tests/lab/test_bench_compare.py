"""Two measurements told apart: better, worse, no evidence, or not comparable at all."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.lab.bench import bootstrap
from headrace.lab.bench.compare import Comparison, compare
from headrace.lab.bench.records import Record
from headrace.lab.bench.result import Result, ResultError, read, write
from headrace.lab.bench.slo import parse_slo
from tests.lab.measuring import bench, running
from tests.lab.streaming_server import Streamer


@pytest.fixture(scope="module")
def measured() -> Result:
    """A real result, whose records tests replace."""
    with running(Streamer()) as address:
        return bench(address, requests=4, levels=(2.0,), slo=parse_slo("ttft=200ms"))


def made(
    base: Result, *, ttft_s: float = 0.1, gap_s: float = 0.01, failed: int = 0, count: int = 80, seed: int = 0
) -> Result:
    """``base`` with made-up requests: noisy by request (the same noise for the same index) and by run."""
    result = msgspec.json.decode(msgspec.json.encode(base), type=Result)
    common, own = np.random.default_rng(99), np.random.default_rng(seed)
    records = []
    for index in range(count):
        size = float(np.exp(0.5 * common.standard_normal()))
        noise = 1 + 0.02 * float(own.standard_normal())
        begin = index * 0.125
        first = begin + ttft_s * size * noise
        chunks = [first + gap_s * step for step in range(8)]
        records.append(
            Record(index=index, scheduled_s=begin, chunk_s=chunks, end_s=chunks[-1], output_tokens=8)
        )
    for record in records[:failed]:
        record.error, record.output_tokens = "timeout", None
    [stage] = result.stages
    stage.records, stage.requests, stage.completed = records, count, count - failed
    stage.window_begin_s, stage.window_s = 0.0, 10.0
    return result


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {difference.metric: difference.verdict for difference in comparison.differences}


def test_the_same_program_twice_is_no_evidence(measured: Result) -> None:
    found = [compare(made(measured, seed=seed), made(measured, seed=seed + 50)) for seed in range(8)]
    assert {comparison.verdict for comparison in found} == {"no evidence"}


def test_pairing_sees_what_the_spread_of_requests_hides(measured: Result) -> None:
    before, after = made(measured, seed=1), made(measured, seed=2, ttft_s=0.108)
    paired = compare(before, after)
    assert all(d.paired for d in paired.differences if d.metric != "output throughput")
    assert verdicts(paired)["TTFT p50"] == "worse" and paired.verdict == "worse"
    after.workload.hash = "another"
    unpaired = compare(before, after)
    assert verdicts(unpaired)["TTFT p50"] == "no evidence"
    assert any("workload differs" in note for note in unpaired.notes)


def test_faster_is_better(measured: Result) -> None:
    found = compare(made(measured, seed=1), made(measured, seed=2, ttft_s=0.05, gap_s=0.005))
    assert {verdicts(found)[m] for m in ("TTFT p50", "TPOT p50", "E2E p50")} == {"better"}
    assert found.verdict == "better"
    [ttft] = [d for d in found.differences if d.metric == "TTFT p50"]
    assert ttft.low < ttft.after - ttft.before < ttft.high < 0
    assert ttft.relative == pytest.approx(-0.5, abs=0.05)


def test_one_metric_that_falls_decides(measured: Result) -> None:
    found = compare(made(measured, seed=1), made(measured, seed=2, ttft_s=0.05, gap_s=0.02))
    assert verdicts(found)["TTFT p50"] == "better" and verdicts(found)["TPOT p50"] == "worse"
    assert found.verdict == "worse"


def test_failures_make_it_worse(measured: Result) -> None:
    found = compare(made(measured, seed=1), made(measured, seed=2, failed=30))
    assert verdicts(found)["failed"] == "worse" and verdicts(found)["SLO met"] == "worse"


def test_lost_throughput_is_worse(measured: Result) -> None:
    before, after = made(measured, seed=1), made(measured, seed=2, count=40)
    after.stages[0].requests = 40
    assert verdicts(compare(before, after))["output throughput"] == "worse"


def test_few_requests_prove_nothing(measured: Result) -> None:
    found = compare(made(measured, count=4), made(measured, count=4, ttft_s=9.0))
    assert verdicts(found)["TTFT p50"] == "no evidence"


def test_what_else_differs_is_said(measured: Result) -> None:
    before, after = made(measured), made(measured)
    after.context.machine, after.endpoint.model = "elsewhere", "other"
    after.settings, after.slo = {"serve": "--threads 1"}, None
    after.stages[0].cached_share, before.stages[0].cached_share = 0.9, 0.0
    found = compare(before, after)
    for word in ("machine differs", "model differs", "serve differs", "SLO differs", "90%"):
        assert any(word in note for note in found.notes), word
    assert "SLO met" not in verdicts(found)


def test_differently_counted_tokens_are_left_out(measured: Result) -> None:
    before, after = made(measured), made(measured)
    after.stages[0].token_source = "chunks"
    assert not {"TPOT p50", "output throughput"} & verdicts(compare(before, after)).keys()


def test_stages_must_be_the_same(measured: Result) -> None:
    before, after = made(measured), made(measured)
    after.stages[0].label = "9 users"
    with pytest.raises(ResultError, match="2 users against 9 users"):
        compare(before, after)


def test_a_result_survives_its_file(measured: Result, tmp_path: Path) -> None:
    write(measured, tmp_path / "new" / "a.json")
    again = read(tmp_path / "new" / "a.json")
    assert msgspec.json.encode(again) == msgspec.json.encode(measured)
    from hdrh.histogram import HdrHistogram

    ttft = again.stages[0].ttft
    assert ttft is not None
    assert HdrHistogram.decode(ttft.histogram).get_total_count() == 4


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"schema": "headrace-bench/1"}', b"[" * 9999]
)
def test_files_that_are_no_result(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ResultError, match=r"x\.json"):
        read(path)


def test_a_newer_schema_is_named(measured: Result, tmp_path: Path) -> None:
    value = json.loads(msgspec.json.encode(measured)) | {"schema": "headrace-bench/9"}
    (tmp_path / "x.json").write_text(json.dumps(value))
    with pytest.raises(ResultError, match="headrace-bench/9"):
        read(tmp_path / "x.json")


def test_the_bootstrap_covers() -> None:
    """A 90% interval of the mean holds the true mean about 90 times in a hundred."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        low, high = bootstrap.interval(
            bootstrap.resampled(rng.exponential(1.0, 60), bootstrap.mean, rng, 400), 0.9
        )
        held += low <= 1.0 <= high
    assert 165 <= held <= 192
