"""Prometheus metrics of one server, in a registry of its own.

Every engine metric is served under two names from one value: ``headrace_x`` and, where vLLM has the same
metric, ``vllm:x``, so that existing dashboards work. No label ever carries a user or a request id.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_OURS_ONLY = tuple(
    f"headrace_{name}"
    for name in (
        "kv_blocks",
        "kv_tier_",
        "preemptions_",
        "step_",
        "deadlines_",
        "tenants_",
        "batch_tokens",
        "device_",
        "draft_seconds",
        "http_",
        "model_load_",
        "checkpoint_",
    )
)

_VLLM_NAMES = {  # where it is not our name with another beginning
    "headrace_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "headrace_draft_tokens_accepted": "vllm:spec_decode_num_accepted_tokens",
    "headrace_draft_tokens_accepted_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


class Stats(Protocol):
    """What the metrics read of an engine's snapshot (``engine.request.EngineStats`` has it all)."""

    num_running_seqs: int
    num_waiting_seqs: int
    num_blocks: int
    num_free_blocks: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    preemptions_swapped: int
    preemptions_recomputed: int
    num_tier_blocks: int
    num_tier_blocks_used: int
    tier_hits: int
    tier_spills: int
    tier_failures: int
    tier_read_bytes: int
    tier_written_bytes: int
    deadlines_missed: int
    deadlines_refused: int
    num_tenants: int
    step_token_budget: int
    draft_seconds: float
    draft_tokens: int
    draft_tokens_accepted: int
    draft_tokens_accepted_per_position: list[int]
    num_steps: int
    step_seconds: float
    batch_tokens: int


class JournalStats(Protocol):
    """What the metrics read of a journal (``engine.journal.JournalStats``)."""

    @property
    def num_requests(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def broken(self) -> bool: ...


class Metrics:
    """The collectors of one server. ``watch`` starts the engine's part once a model is loaded."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        labels = ("model_name",)
        inner: list[Collector] = []

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(f"headrace_{name}", text, labels, buckets=tuple(buckets), registry=None)
            inner.append(made)
            return made.labels(model_name)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.itl = histogram("inter_token_latency_seconds", "Between two outputs of a choice.", _SECONDS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to the end of a request.", _SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first scheduled.", _SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "Scheduled to first token.", _SECONDS)
        self.decode_time = histogram("request_decode_time_seconds", "First token to last.", _SECONDS)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated.", _TOKENS)
        self._success = Counter(
            "headrace_request_success",
            "Choices that ended, by finish_reason.",
            (*labels, "finished_reason"),
            registry=None,
        )
        inner.append(self._success)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)
        self.http_requests = Counter(
            "headrace_http_requests", "Requests answered.", ("route", "status"), registry=None
        )
        self._load_seconds = Gauge(
            "headrace_model_load_seconds",
            "Time from the opening of the model's files until it was served.",
            labels,
            registry=None,
        )
        self.registry.register(_Aliased([*inner, self.http_requests, self._load_seconds]))
        self.registry.register(_ProcessCollector())

    def watch(self, stats: Callable[[], Stats], load_seconds: float) -> None:
        """Serve the engine's counters too, read by ``stats`` at every scrape."""
        self._load_seconds.labels(self._model_name).set(load_seconds)
        self.registry.register(_Aliased([_EngineCollector(self._model_name, stats)]))

    def watch_journal(self, stats: Callable[[], JournalStats]) -> None:
        """Serve what ``stats`` says of the journal, too."""
        self.registry.register(_JournalCollector(self._model_name, stats))

    def finished(self, reason: str) -> None:
        """Count one choice that ended for ``reason``."""
        self._success.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Aliased(Collector):
    """Yields what the inner collectors hold, each once more under vLLM's name."""

    def __init__(self, inner: list[Collector]) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for collector in self._inner:
            for metric in collector.collect():
                # when each series was created is of no use here and would double the page
                metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
                yield metric
                if not metric.name.startswith(_OURS_ONLY):
                    yield _as_vllm(metric)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only while collecting, and the registry needs none."""
        return iter(())


def _as_vllm(metric: Metric) -> Metric:
    name = _VLLM_NAMES.get(metric.name, metric.name.replace("headrace_", "vllm:", 1))
    alias = Metric(name, metric.documentation, metric.type)
    alias.samples = [s._replace(name=s.name.replace(metric.name, name, 1)) for s in metric.samples]
    return alias


class _ProcessCollector(Collector):
    """CPU of this process and its children (an engine's, where it has one), under Prometheus' own name."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        seconds = _cpu_seconds(self._process)
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                seconds += _cpu_seconds(child)
        yield CounterMetricFamily("process_cpu_seconds", "User and system CPU time spent.", seconds)
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        yield GaugeMetricFamily("headrace_usable_cores", "Cores that the process may run on.", usable)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class _JournalCollector(Collector):
    """Reads the journal's snapshot when asked."""

    def __init__(self, model_name: str, stats: Callable[[], JournalStats]) -> None:
        self._model = [model_name]
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("requests", "Requests in the journal: under way, or complete and kept.", stats.num_requests),
            ("bytes", "Size of the journal.", stats.size_bytes),
            ("broken", "1 while the journal cannot be written.", int(stats.broken)),
        ):
            metric = GaugeMetricFamily(f"headrace_checkpoint_{name}", text, labels=("model_name",))
            metric.add_metric(self._model, value)
            yield metric


class _EngineCollector(Collector):
    """Reads the engine's snapshot when asked; holds no counts of its own."""

    def __init__(self, model_name: str, stats: Callable[[], Stats]) -> None:
        self._model = [model_name]
        self._stats = stats
        self._process = psutil.Process()
        self._last = (time.monotonic(), 0.0)
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Sequences being computed.", stats.num_running_seqs)
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", stats.num_waiting_seqs)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 = all.", stats.kv_cache_usage)
        yield self._gauge("kv_blocks_total", "KV blocks of the pool.", stats.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that no sequence holds.", stats.num_free_blocks)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        yield self._counter("prompt_tokens", "Prompt tokens of scheduled requests.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter(
            "num_preemptions", "Sequences put back for want of blocks.", stats.num_preemptions
        )
        yield self._counter(
            "preemptions_swapped", "Of these: back by the second tier.", stats.preemptions_swapped
        )
        yield self._counter(
            "preemptions_recomputed", "Of these: back by computing.", stats.preemptions_recomputed
        )
        yield self._gauge("kv_tier_blocks_total", "KV blocks of the second tier.", stats.num_tier_blocks)
        yield self._gauge("kv_tier_blocks_used", "Those that hold something.", stats.num_tier_blocks_used)
        yield self._counter("kv_tier_hits", "KV blocks that came back from it.", stats.tier_hits)
        yield self._counter("kv_tier_spills", "KV blocks written to it.", stats.tier_spills)
        yield self._counter("kv_tier_failures", "KV blocks damaged or not readable.", stats.tier_failures)
        yield self._counter("kv_tier_read_bytes", "Bytes that came back.", stats.tier_read_bytes)
        yield self._counter("kv_tier_written_bytes", "Bytes written.", stats.tier_written_bytes)
        yield self._counter("deadlines_missed", "Requests ended after timeout_s.", stats.deadlines_missed)
        yield self._counter(
            "deadlines_refused", "Requests ended before it: not to be kept.", stats.deadlines_refused
        )
        yield self._gauge("tenants_active", "Tenants with a sequence in hand.", stats.num_tenants)
        yield self._gauge(
            "step_token_budget", "Most tokens of the last step: see tpot_target.", stats.step_token_budget
        )
        yield self._counter("draft_seconds", "Time spent on making drafts.", stats.draft_seconds)
        yield self._counter("draft_tokens", "Tokens drafted and verified.", stats.draft_tokens)
        yield self._counter("draft_tokens_accepted", "Drafted tokens kept.", stats.draft_tokens_accepted)
        yield self._per_position(stats.draft_tokens_accepted_per_position)
        yield self._summary("step_seconds", "Time in engine steps.", stats.num_steps, stats.step_seconds)
        yield self._summary("batch_tokens", "Tokens in engine steps.", stats.num_steps, stats.batch_tokens)
        yield self._gauge("device_memory_bytes", "Resident memory, the engine's included.", self._memory())
        yield self._gauge(
            "device_utilization_ratio",
            "Share of time in steps since the last scrape (a second ago or more).",
            self._busy(stats.step_seconds),
        )

    def _memory(self) -> int:
        total: int = self._process.memory_info().rss
        for child in self._process.children():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                total += child.memory_info().rss
        return total

    def _busy(self, step_seconds: float) -> float:
        now = time.monotonic()
        then, before = self._last
        if now - then >= 1.0:
            self._utilization = min((step_seconds - before) / (now - then), 1.0)
            self._last = (now, step_seconds)
        return self._utilization

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"headrace_{name}", text, labels=("model_name",))
        metric.add_metric(self._model, value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"headrace_{name}", text, labels=("model_name",))
        metric.add_metric(self._model, value)
        return metric

    def _per_position(self, accepted: list[int]) -> Metric:
        metric = CounterMetricFamily(
            "headrace_draft_tokens_accepted_per_pos",
            "Drafted tokens kept, by their place in the draft.",
            labels=("model_name", "position"),
        )
        for position, count in enumerate(accepted):
            metric.add_metric([*self._model, str(position)], count)
        return metric

    def _summary(self, name: str, text: str, count: int, total: float) -> Metric:
        metric = SummaryMetricFamily(f"headrace_{name}", text, labels=("model_name",))
        metric.add_metric(self._model, count_value=count, sum_value=total)
        return metric
