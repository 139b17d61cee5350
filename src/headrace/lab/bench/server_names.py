"""What servers call their metrics: one table of names, and a reader of /metrics pages.

Sources: vLLM's "Production metrics" page, TGI's "Metrics" reference, llama.cpp's server README
(``--metrics``), and our own ``observe/metrics.py``.
"""

from __future__ import annotations

import contextlib
import re
from typing import Literal

Engine = Literal["headrace", "vllm", "tgi", "llama.cpp"]

_PREFIX_OF: dict[str, Engine] = {
    "headrace_": "headrace",  # first: it serves vLLM's names too
    "vllm:": "vllm",
    "tgi_": "tgi",
    "llamacpp:": "llama.cpp",
}
_PREFIXES = (*_PREFIX_OF, "process_cpu_seconds")
_SHARES = ("_perc", "_ratio")  # of one replica each: averaged over labels where other values are summed

# What is wanted, and the names it goes by: the first that a page has counts.
GAUGES = {
    "running": ("vllm:num_requests_running", "tgi_batch_current_size", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "tgi_queue_size", "llamacpp:requests_deferred"),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "cores": ("headrace_usable_cores",),
    "load_s": ("headrace_model_load_seconds",),
}
COUNTERS = {
    "queue_s": ("vllm:request_queue_time_seconds_sum", "tgi_request_queue_duration_sum"),
    "queued": ("vllm:request_queue_time_seconds_count", "tgi_request_queue_duration_count"),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum", "tgi_batch_forward_duration_sum[prefill]"),
    "prefilled": ("vllm:request_prefill_time_seconds_count", "tgi_batch_forward_duration_count[prefill]"),
    "prompt_s": ("llamacpp:prompt_seconds_total",),
    "prompt_tokens": ("llamacpp:prompt_tokens_total",),
    "frontend_s": ("tgi_request_validation_duration_sum",),
    "validated": ("tgi_request_validation_duration_count",),
    "looked_up": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "found": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    "steps": ("headrace_step_seconds_count",),
    "step_s": ("headrace_step_seconds_sum",),
    "step_tokens": ("headrace_batch_tokens_sum",),
    "cpu_s": ("process_cpu_seconds_total",),
}


def parse_metrics(page: str) -> dict[str, float]:
    """Name to value, summed over labels (shares: averaged); only names of engines that are known here.

    A series with a ``method`` label counts under ``name[method]`` as well.
    """
    values: dict[str, float] = {}
    seen: dict[str, int] = {}
    for line in page.splitlines():
        if not line.startswith(_PREFIXES) or "_bucket" in line:
            continue
        name, _, rest = line.partition("{")
        labels = ""
        if rest:
            labels, _, text = rest.rpartition("}")
        else:
            name, _, text = line.partition(" ")
        with contextlib.suppress(ValueError, IndexError):
            value = float(text.split()[0])
            method = re.search(r'(?:^|,)\s*method="([^"]*)"', labels)
            for key in (name, *([f"{name}[{method[1]}]"] if method else [])):
                values[key] = values.get(key, 0.0) + value
                seen[key] = seen.get(key, 0) + 1
    return {k: v / seen[k] if k.endswith(_SHARES) else v for k, v in values.items()}


def engine_of(values: dict[str, float]) -> Engine | None:
    """Whose names a page has; None if nobody's that are known."""
    for prefix, engine in _PREFIX_OF.items():
        if any(name.startswith(prefix) for name in values):
            return engine
    return None
