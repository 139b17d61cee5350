"""Prometheus metrics of a gateway, in a registry of its own. Labels are names of the configuration only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from headrace.gateway.admit import Admissions
    from headrace.gateway.settlements import Settlements
    from headrace.gateway.upstream import Upstream

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The collectors of one gateway."""

    def __init__(
        self, upstreams: Callable[[], Iterable[Upstream]], admissions: Admissions, settlements: Settlements
    ) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_gateway_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests that ended.", "tenant", "model", "outcome")
        self.tokens = counter("tokens", "Tokens that upstreams used.", "tenant", "model", "kind")
        self.cost = counter("cost_usd", "What they cost, in dollars.", "tenant", "model")
        self.cache = counter("cache", "Requests by what the caches did.", "result")
        self.semantic = counter("semantic_lookups", "Questions by what the semantic cache found.", "result")
        self.semantic_checks = counter(
            "semantic_checks", "Kept answers compared with fresh ones.", "candidate", "result"
        )
        self.semantic_learning = Gauge(
            "headrace_gateway_semantic_learning",
            "Fresh answers that are being compared and kept.",
            registry=self.registry,
        )
        self.batches = counter("batches", "Requests for embeddings that were made of several.")
        self.batched = counter("batched_requests", "Those that they were made of.")
        self.token_counts = counter("token_counts", "Prompts to be counted by a tokenizer.", "result")
        self.refusals = counter("refusals", "Requests answered with an error.", "status")
        self.failures = counter("upstream_failures", "Attempts that failed.", "upstream", "reason")
        self.retries = counter("retries", "Attempts after the first one.")
        self.resumed = counter("resumed", "Streams that went on at an upstream.", "upstream", "how")
        self.release_requests = counter(
            "release_requests", "Requests of a release that ended.", "release", "version", "outcome"
        )
        self.release_weight = Gauge(
            "headrace_gateway_release_weight",
            "Percent of a release's requests that a version gets.",
            ("release", "version"),
            registry=self.registry,
        )
        self.routed = counter(
            "routed", "Requests by what their route made of them.", "route", "intent", "model", "reason"
        )
        self.no_embedding = counter("routed_without_embedding", "Those judged by cheap features.", "route")
        self.baseline = counter(
            "baseline_cost_usd",
            "Cost of the same tokens without the cache and by the large model of routes, in dollars.",
            "tenant",
            "model",
            "answered",
        )
        self.intent_seconds = Histogram(
            "headrace_gateway_intent_seconds",
            "Time to decide a route, the wait for the embedding included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "headrace_gateway_request_seconds",
            "Arrival to the end of a request.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "headrace_gateway_time_to_first_byte_seconds",
            "Arrival to an upstream's first byte.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_Now(upstreams, admissions, settlements))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Now(Collector):
    """Reads what is under way when asked; holds no counts of its own."""

    def __init__(
        self, upstreams: Callable[[], Iterable[Upstream]], admissions: Admissions, settlements: Settlements
    ) -> None:
        self._upstreams = upstreams
        self._admissions = admissions
        self._settlements = settlements

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("requests_running", "Requests that were admitted and have not ended.", self._admissions.running),
            ("requests_waiting", "Requests that wait for admission.", self._admissions.waiting),
            ("settlements_waiting", "Ended requests that are to be written.", self._settlements.waiting),
        ):
            yield GaugeMetricFamily(f"headrace_gateway_{name}", text, value)
        requests = _gauge("upstream_requests", "Requests that an upstream works on.")
        tokens = _gauge("upstream_tokens", "Their tokens, estimated.")
        share = _gauge("upstream_share", "Share of its weight that an upstream gets; 0 = ejected.")
        for upstream in self._upstreams():
            requests.add_metric([upstream.name], upstream.in_flight)
            tokens.add_metric([upstream.name], upstream.outstanding_tokens)
            share.add_metric([upstream.name], upstream.health.share())
        yield from (requests, tokens, share)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"headrace_gateway_{name}", text, labels=("upstream",))
