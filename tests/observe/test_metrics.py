"""Metrics: one value under two names, read from the engine's snapshot at every scrape."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.request import EngineStats
from headrace.observe.metrics import Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Samples of a scrape by name, labels left out but for finished_reason."""
    out = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            out[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return out


def test_the_engine_is_read_at_every_scrape() -> None:
    metrics = Metrics("m")
    stats = EngineStats(num_running_seqs=2, num_blocks=10, num_free_blocks=7, kv_cache_usage=0.3)
    metrics.watch(lambda: stats, load_seconds=1.5)
    stats.prompt_tokens = 40
    stats.num_steps, stats.step_seconds, stats.batch_tokens = 4, 0.5, 60
    seen = samples(metrics)
    assert seen["vllm:num_requests_running"] == seen["headrace_num_requests_running"] == 2
    assert seen["vllm:kv_cache_usage_perc"] == 0.3
    assert seen["headrace_kv_blocks_free"] == 7
    assert seen["headrace_kv_blocks_total"] == 10
    assert seen["vllm:prompt_tokens_total"] == 40
    assert (seen["headrace_step_seconds_count"], seen["headrace_step_seconds_sum"]) == (4, 0.5)
    assert seen["headrace_model_load_seconds"] == 1.5
    assert seen["headrace_device_memory_bytes"] > 1e6
    assert 0 <= seen["headrace_device_utilization_ratio"] <= 1
    stats.num_running_seqs = 0
    assert samples(metrics)["vllm:num_requests_running"] == 0


def test_the_second_tier_and_who_came_back_by_it() -> None:
    metrics = Metrics("m")
    stats = EngineStats(
        num_tier_blocks=9,
        num_tier_blocks_used=4,
        tier_hits=3,
        tier_spills=5,
        tier_failures=1,
        tier_read_bytes=300,
        tier_written_bytes=500,
        preemptions_swapped=2,
        preemptions_recomputed=6,
    )
    metrics.watch(lambda: stats, load_seconds=0.0)
    seen = samples(metrics)
    assert seen["headrace_kv_tier_blocks_total"] == 9
    assert seen["headrace_kv_tier_blocks_used"] == 4
    assert seen["headrace_kv_tier_hits_total"] == 3
    assert seen["headrace_kv_tier_spills_total"] == 5
    assert seen["headrace_kv_tier_failures_total"] == 1
    assert seen["headrace_kv_tier_read_bytes_total"] == 300
    assert seen["headrace_kv_tier_written_bytes_total"] == 500
    assert seen["headrace_preemptions_swapped_total"] == 2
    assert seen["headrace_preemptions_recomputed_total"] == 6
    assert not any(name.startswith(("vllm:kv_tier", "vllm:preemptions")) for name in seen)


def test_every_documented_name_is_there() -> None:
    """Dashboards made for vLLM must find their metrics."""
    metrics = Metrics("m")
    metrics.watch(EngineStats, load_seconds=0.0)
    seen = samples(metrics)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "request_success_total/stop",
        "request_success_total/length",
    ):
        assert f"vllm:{name}" in seen, name
        assert f"headrace_{name}" in seen, name


def test_servers_do_not_share_counts() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.finished("stop")
    one.ttft.observe(0.1)
    assert samples(one)["vllm:request_success_total/stop"] == 1
    assert samples(one)["vllm:time_to_first_token_seconds_count"] == 1
    assert samples(other)["vllm:request_success_total/stop"] == 0


def test_the_process_tells_its_cpu_and_its_cores_from_the_start() -> None:
    """Also before a model is loaded: loading is work, too."""
    metrics = Metrics("m")
    before = samples(metrics)
    assert before["headrace_usable_cores"] >= 1 and "vllm:usable_cores" not in before
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    grown = samples(metrics)["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    assert 0.05 < grown < 5
