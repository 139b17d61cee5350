"""/metrics under load: the agreed names, and counts that agree with what clients were told."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from tests import http
from tests.e2e.running import RunningServer

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
)
OURS = (
    *("headrace_model_load_seconds", "headrace_device_memory_bytes", "headrace_device_utilization_ratio"),
    *("headrace_batch_tokens_sum", "headrace_step_seconds_sum"),
)


def scrape(server: RunningServer) -> dict[str, float]:
    """Every sample by name, the series of one name added up."""
    found: dict[str, float] = {}
    page = http.get(f"{server.url}/metrics", timeout=30).text
    for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_names_and_counts_under_load(server: RunningServer) -> None:
    server.wait_idle()
    before = scrape(server)
    usages: list[dict[str, Any]] = []

    def ask(number: int) -> None:
        body = {
            "prompt": f"Number {number} is",
            "max_tokens": 20 + number,
            "n": 1 + number % 2,
            "ignore_eos": True,
        }
        answer = http.post(f"{server.url}/v1/completions", json=body, timeout=60)
        usages.append(answer.json()["usage"])

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    running, used, busiest = 0.0, 0.0, 0.0
    while any(client.is_alive() for client in clients):
        now = scrape(server)
        running = max(running, now["vllm:num_requests_running"])
        used = max(used, now["vllm:kv_cache_usage_perc"])
        busiest = max(busiest, now["headrace_device_utilization_ratio"])
        assert now["vllm:num_requests_running"] == now["headrace_num_requests_running"]
        time.sleep(0.02)
    assert 1 <= running <= 12
    assert 0 < used < 0.5
    server.wait_idle()
    after = scrape(server)

    for name in (*GAUGES, *COUNTERS, *(f"{name}_count" for name in HISTOGRAMS)):
        assert f"vllm:{name}" in after, name
    for name in OURS:
        assert name in after, name

    def grown(name: str) -> float:
        return after[name] - before[name]

    generated = sum(usage["completion_tokens"] for usage in usages)
    prompted = sum(usage["prompt_tokens"] for usage in usages)
    assert generated == sum((20 + number) * (1 + number % 2) for number in range(8))
    assert grown("vllm:generation_tokens_total") == generated
    assert grown("vllm:request_generation_tokens_sum") == generated
    assert grown("vllm:request_prompt_tokens_sum") == prompted
    assert grown("vllm:request_success_total") == 12
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert grown(f"vllm:{name}_count") == 8, name
    assert grown("headrace_batch_tokens_sum") >= generated - 12
    deadline = time.monotonic() + 60
    while not busiest:  # it looks back a second or more, and all that was done may have taken less
        assert time.monotonic() < deadline
        time.sleep(0.02)
        busiest = scrape(server)["headrace_device_utilization_ratio"]
    assert busiest <= 1
    assert 0 < after["headrace_model_load_seconds"] < server.ready_s
