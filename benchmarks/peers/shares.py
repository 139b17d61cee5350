"""The least time that a workload can take on this machine: what a result is given as a share of.

The roofline of Williams, Waterman and Patterson (2009): a step must read its weights and K and V once, and
make its products; the slower of the two bounds it. Sampling, norms and everything between are free.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads import Workload

from headrace.backend.cpu.limits import Limits
from headrace.model.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one token: products in the layers' matrices, in the head, and in attention per token of context;
    bytes of K and V (bf16) per token of context."""

    linear: int
    head: int
    attention: int
    kv_bytes: int


def costs_of(architecture: Architecture) -> Costs:
    """Counted from the shapes."""
    hidden = architecture.hidden_size
    linear = attention = kv_bytes = 0
    for spec in architecture.layers:
        one = spec.attention
        queries, keys = one.heads * one.head_dim, one.kv_heads * one.head_dim
        linear += hidden * (2 * queries + 2 * keys)
        linear += (3 if spec.feed_forward.gated else 2) * hidden * spec.feed_forward.width
        attention += 2 * queries
        kv_bytes += 2 * 2 * keys
    return Costs(linear, hidden * architecture.vocab_size, attention, kv_bytes)


def least_seconds(
    workload: Workload, costs: Costs, weights_bytes: int, multiplies: str, limits: Limits
) -> tuple[float, float]:
    """Of the prompts (each shared prefix once), and of all decoding steps."""
    rate = limits.int8_macs_per_s if multiplies == "int8" else limits.bf16_macs_per_s
    requests, own = workload.requests, workload.prompt - workload.shared
    new = workload.shared + requests * own
    pairs = workload.shared**2 / 2 + requests * (own * workload.shared + own**2 / 2)
    prompt = max(
        (new * costs.linear + requests * costs.head) / rate
        + pairs * costs.attention / limits.bf16_macs_per_s,
        weights_bytes / limits.read(weights_bytes),
    )
    steps = workload.output - 1
    context = workload.prompt + workload.output / 2
    touched = weights_bytes + requests * context * costs.kv_bytes
    computing = requests * (costs.linear + costs.head) / rate
    computing += requests * context * costs.attention / limits.bf16_macs_per_s
    return prompt, steps * max(touched / limits.read(touched), computing)


def share(workload: Workload, seconds: float, first_s: float | None, least: tuple[float, float]) -> float:
    """Of the limit, 0 to 1: of decoding alone where its rate is told, else of the whole."""
    prompt, decoding = least
    if workload.measure == "decode" and first_s is not None:
        return decoding / max(seconds - first_s, 1e-9)
    return (prompt + decoding) / seconds
