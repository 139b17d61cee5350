"""The verdict, from measurements that were recorded on slow servers and from made ones: pure logic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.lab.bench.client_watch import ClientStats
from headrace.lab.bench.server_names import parse_metrics
from headrace.lab.bench.server_watch import ServerStats, summarise
from headrace.lab.diagnose.measurements import Gentle, Level, Measurements, Network
from headrace.lab.diagnose.split import gentle_split, scaling
from headrace.lab.diagnose.switches import Switch, proof, switch
from headrace.lab.diagnose.verdict import diagnose

_RECORDED = Path(__file__).parent.parent / "data" / "diagnose"
_CAUSES = {
    "batch_of_one": "batch_too_small",
    "tiny_kv_pool": "kv_full",
    "one_thread": "cpu_bound",
    "slow_tokenizer": "frontend",
    "queue_limit": "queueing",
}
_GROWS = {1: (80.0, 52.0, 10.0), 8: (500.0, 70.0, 13.0), 64: (2600.0, 110.0, 22.0)}  # tok/s, TTFT, TPOT
_FLAT = {1: (80.0, 52.0, 10.0), 8: (110.0, 300.0, 68.0), 64: (111.0, 2000.0, 560.0)}


def recorded(name: str) -> Measurements:
    """What diagnose measured of one of our own servers, SmolLM2 on two cores."""
    return msgspec.json.decode((_RECORDED / f"{name}.json").read_bytes(), type=Measurements)


def measured(
    levels: dict[int, tuple[float, float, float]], server: ServerStats | None = None, **fields: Any
) -> Measurements:
    """By users: tok/s, TTFT and TPOT in ms. One user's TTFT is 26.8 ms and 0.2 ms a prompt token."""
    client = ClientStats(cpu=0.05, loop_lag_p50_ms=0.2, loop_lag_p99_ms=2.0, late=0.02)
    given = {
        "target": "http://h:8000",
        "model": "m",
        "route": "chat",
        "network": Network(connect_ms=0.2, answer_ms=0.5, path="/health"),
        "gentle": [
            Gentle(prompt_tokens=n, requests=3, ttft_ms=26.8 + 0.2 * n, tpot_ms=10.0, e2e_ms=100 + 0.2 * n)
            for n in (16, 128, 1024)
        ],
        "levels": [
            Level(
                users=users,
                window_s=5,
                requests=100,
                completed=100,
                tok_s=tok_s,
                prompt_tokens=128,
                output_tokens=64,
                ttft_ms=ttft,
                tpot_ms=tpot,
                e2e_ms=ttft + 63 * tpot,
                server=server,
                client=client,
            )
            for users, (tok_s, ttft, tpot) in levels.items()
        ],
    }
    return Measurements(**(given | fields))


def causes(m: Measurements) -> list[str]:
    return [finding.cause for finding in diagnose(m).findings]


@pytest.mark.parametrize(("name", "cause"), _CAUSES.items())
def test_recorded_servers_are_named(name: str, cause: str) -> None:
    found = diagnose(recorded(name))
    first = found.findings[0]
    assert first.cause == cause
    assert first.evidence and first.attempt and first.gain and first.confidence != "low"
    assert first.proof[-1] == "headrace bench --compare before.json after.json"
    assert found.ttft is not None
    parts = (found.ttft.network_ms, found.ttft.queue_ms, found.ttft.prefill_ms, found.ttft.frontend_ms)
    assert sum(parts) == pytest.approx(found.ttft.total_ms) and min(parts) >= 0
    assert found.tpot is not None
    assert found.tpot.alone_ms + found.tpot.neighbours_ms == pytest.approx(found.tpot.total_ms)


@pytest.mark.parametrize("name", _CAUSES)
def test_low_utilisation_always_has_a_cause(name: str) -> None:
    m = recorded(name)
    for cpu in (0.0, 0.5, 1.0, 1.5, 2.0):
        for busy in (0.1, 0.9):
            for lv in m.levels:
                assert lv.server is not None
                lv.server.cpu_cores, lv.server.busy = cpu, busy
            found = diagnose(m)
            assert found.utilisation is not None
            assert (found.utilisation_cause is None) == (found.utilisation.share >= 0.8)


def test_a_client_that_cannot_keep_up_comes_before_everything() -> None:
    m = recorded("batch_of_one")
    m.levels[-1].client = ClientStats(cpu=0.2, loop_lag_p50_ms=0.1, loop_lag_p99_ms=90.0, late=0.7)
    assert causes(m)[:2] == ["client", "batch_too_small"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "--max-num-seqs 16"),
        ("tgi", "--max-batch-size 16"),
        ("llama.cpp", "--parallel 16"),
        (None, "the limit on sequences"),
    ],
)
def test_switches_are_in_the_engines_own_words(engine: str | None, words: str) -> None:
    m = recorded("batch_of_one")
    m.owner, m.is_model, m.target = "", False, "http://h:8000"
    for part in (*m.levels, *m.gentle):
        assert part.server is not None
        part.server.engine = engine
    first = diagnose(m).findings[0]
    assert first.attempt.startswith(words)
    assert f"# now change: {first.attempt}" in first.proof


def test_without_metrics_a_batch_limit_shows_in_throughput_and_ttft() -> None:
    """TPOT stays, throughput stays, TTFT grows with the users: they wait for the one that runs."""
    m = measured({1: (90.0, 52.0, 10.0), 4: (91.0, 2140.0, 10.0), 8: (91.0, 4800.0, 10.0)})
    found = diagnose(m)
    assert found.findings[0].cause == "batch_too_small" and found.findings[0].confidence == "medium"
    assert found.ttft_loaded is not None and found.ttft_loaded.share("queue") > 0.9
    assert any("no /metrics" in note for note in found.notes)


def test_the_network_is_told_from_the_server() -> None:
    far = Network(connect_ms=120.0, answer_ms=124.0, path="/health")
    gentle = [
        Gentle(prompt_tokens=n, requests=3, ttft_ms=147 + 0.2 * n, tpot_ms=10.0, e2e_ms=220)
        for n in (16, 512)
    ]
    found = diagnose(measured(_GROWS, network=far, gentle=gentle))
    assert found.findings[0].cause == "network"
    assert found.ttft is not None and found.ttft.network_ms == 124.0
    assert found.ttft.frontend_ms < 40


def test_a_repeated_prompt_tells_the_tokenizer_from_prefill() -> None:
    """Both grow with the prompt; only what a prefix cache can't save is the frontend's."""
    gentle = [
        Gentle(prompt_tokens=n, requests=3, ttft_ms=12 + 1.0 * n, tpot_ms=10.0, e2e_ms=100.0)
        for n in (16, 128, 512)
    ]
    again = Gentle(
        prompt_tokens=512, cached_tokens=496, repeated=True, requests=2, ttft_ms=422.0, tpot_ms=10.0
    )
    slow = measured(_GROWS, gentle=[*gentle, again])
    split = gentle_split(slow)
    assert split is not None and split.source == "slope"
    assert causes(slow)[0] == "frontend"
    again.ttft_ms = 13.0
    assert "frontend" not in causes(measured(_GROWS, gentle=[*gentle, again]))


def test_a_cold_start() -> None:
    assert "cold_start" in causes(measured(_GROWS, first_answer_ms=9000.0))
    assert "cold_start" not in causes(measured(_GROWS, first_answer_ms=60.0))


def test_bandwidth_is_told_from_arithmetic() -> None:
    """Neighbours that cost nearly nothing, and neighbours that cost as much as they bring."""
    assert causes(measured({1: (80.0, 52.0, 10.0), 8: (500.0, 70.0, 13.0)})) == ["bandwidth_bound"]
    assert causes(measured(_FLAT, ServerStats(running_max=64, waiting_mean=0.0))) == ["compute_bound"]


def test_a_host_that_cannot_feed_its_device() -> None:
    server = ServerStats(
        engine="vllm", device_busy=0.45, cpu_cores=1.1, cores=16, busiest_thread=0.98, running_max=64
    )
    found = diagnose(measured(_GROWS, server))
    assert found.findings[0].cause == "cpu_bound" and "device" in found.findings[0].title
    assert found.findings[0].attempt == "--async-scheduling"
    assert found.utilisation is not None and found.utilisation.of == "device"
    assert found.utilisation_cause == found.findings[0].title


def test_failures_are_a_finding_with_their_kind() -> None:
    m = measured(_GROWS)
    m.levels[-1].errors = {"stream_error": 30}
    m.levels[-1].error_examples = {"stream_error": "a device was lost"}
    first = diagnose(m).findings[0]
    assert first.cause == "errors" and any("a device was lost" in line for line in first.evidence)


def test_refusals_far_beyond_the_best_are_still_told() -> None:
    m = measured(_GROWS)
    m.levels[-1].errors = {"rate_limited": 20}
    assert causes(m)[0] == "queueing"


def test_nothing_measured_is_said_to_be_unexplained() -> None:
    found = diagnose(measured({}, gentle=[], streaming=False))
    assert found.findings[0].cause == "unexplained" and found.findings[0].confidence == "low"
    assert any("does not stream" in note for note in found.notes)


def test_the_curve_of_one_user_is_marked_as_an_estimate() -> None:
    one, many = scaling(measured({1: (80.0, 52.0, 10.0)})), scaling(measured(_GROWS))
    assert one is not None and not one.measured
    assert many is not None and many.measured
    assert many.tok_s(8) == pytest.approx(8000 / (10 + 7 * many.row_ms + many.prefill_ms))


def test_a_models_own_options_are_replaced_not_repeated() -> None:
    m = measured({}, target="smollm2-135m", is_model=True, serve="--threads=1 --max-num-seqs 1 --seed 3")
    changed = switch("batch", "headrace", n=8)
    before, after, _ = proof(m, changed, 8, 31.4, 24.0)
    assert before.endswith("--serve '--threads=1 --max-num-seqs 1 --seed 3' --output before.json")
    assert after.endswith("--serve '--threads=1 --seed 3 --max-num-seqs 8' --output after.json")
    assert "--concurrency 8 --prompt-tokens 31 --output-tokens 24" in after
    flag = proof(m, Switch(text="", serve={"--engine-process": ""}), 1, 1, 1)[1]
    assert "--seed 3 --engine-process'" in flag


def page(engine: str, at: int) -> dict[str, float]:
    """A page as the engine serves it, ``at`` seconds after the first."""
    pages = {
        "tgi": f"""
# TYPE tgi_queue_size gauge
tgi_queue_size 7
tgi_batch_current_size 4
tgi_request_queue_duration_sum {0.5 * at}
tgi_request_queue_duration_count {at}
tgi_request_validation_duration_sum {0.02 * at}
tgi_request_validation_duration_count {at}
tgi_batch_forward_duration_bucket{{method="prefill",le="1"}} 3
tgi_batch_forward_duration_sum{{method="prefill"}} {0.1 * at}
tgi_batch_forward_duration_count{{method="prefill"}} {at}
tgi_batch_forward_duration_sum{{method="decode"}} {0.9 * at}
tgi_batch_forward_duration_count{{method="decode"}} {30 * at}
""",
        "llama.cpp": f"""
llamacpp:requests_processing 4
llamacpp:requests_deferred 7
llamacpp:prompt_tokens_total {100 * at}
llamacpp:prompt_seconds_total {0.2 * at}
""",
        "vllm": f"""
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 7.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.9
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.7
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} {0.1 * at}
vllm:request_prefill_time_seconds_count{{engine="0",model_name="m"}} {at}
""",
    }
    return parse_metrics(pages[engine])


@pytest.mark.parametrize("engine", ["vllm", "tgi", "llama.cpp"])
def test_each_engines_metrics_are_read_under_their_names(engine: str) -> None:
    stats = summarise([(float(at), page(engine, at)) for at in range(4)])
    assert stats.engine == engine
    assert (stats.running_max, stats.waiting_mean) == (4, 7)
    if engine == "llama.cpp":
        assert stats.prefill_ms_per_token == pytest.approx(2.0)
    else:
        assert stats.prefill_time_mean_ms == pytest.approx(100)
    if engine == "tgi":
        assert (stats.queue_time_mean_ms, stats.frontend_time_mean_ms) == (500, 20)
    if engine == "vllm":
        assert stats.kv_usage_max == pytest.approx(0.8)  # of two engines, on average
