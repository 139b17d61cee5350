"""What was measured of an endpoint: all that the verdict is made from, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from headrace.lab.bench.client_watch import ClientStats
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.server_watch import ServerStats


class Network(msgspec.Struct, kw_only=True):
    """``connect_ms``: a TCP handshake, one round trip (least of several). ``answer_ms``: a GET of ``path``
    on a connection that is open, while the server is idle (median).
    """

    connect_ms: float | None = None
    answer_ms: float | None = None
    path: str = ""


class Gentle(msgspec.Struct, kw_only=True):
    """One user, prompts of one length: medians, and what the server itself says of these requests (means,
    which ``ttft_mean_ms`` goes with).

    ``repeated``: the very same prompt again and again, which a prefix cache knows.
    """

    prompt_tokens: float
    requests: int
    cached_tokens: float = 0.0
    repeated: bool = False
    ttft_ms: float | None = None
    ttft_mean_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    server: ServerStats | None = None
    client: ClientStats | None = None


class Level(msgspec.Struct, kw_only=True):
    """So many users at a time. ``tok_s``: output tokens a second. ``answer_ms``: as Network's, but now."""

    users: int
    window_s: float
    requests: int
    completed: int
    tok_s: float
    errors: dict[str, int] = {}
    error_examples: dict[str, str] = {}
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    cached_share: float | None = None
    ttft_ms: float | None = None
    ttft_mean_ms: float | None = None
    ttft_p95_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    answer_ms: float | None = None
    server: ServerStats | None = None
    client: ClientStats

    @property
    def refused_share(self) -> float:
        """Of the requests that ended: those that the server would not take (429 and 503)."""
        refused = self.errors.get("rate_limited", 0) + self.errors.get("overloaded", 0)
        return refused / self.requests if self.requests else 0.0

    @property
    def failed_share(self) -> float:
        """Of the requests that ended: those that failed in any other way."""
        failed = sum(self.errors.values()) - self.errors.get("rate_limited", 0)
        return (failed - self.errors.get("overloaded", 0)) / self.requests if self.requests else 0.0


class Hardware(msgspec.Struct, kw_only=True):
    """What ``threads`` threads of this machine do at most, measured, and what the model asks of them.

    ``macs_per_token``: multiply-accumulates of the layers for one token, without attention and the output
    head.
    """

    threads: int
    weight_bytes: int
    macs_per_token: int
    read_bytes_s: float
    int8_macs_s: float


class Measurements(msgspec.Struct, kw_only=True):
    """A whole run. ``target`` is what the user wrote, ``serve`` the options that a MODEL was served with.

    ``narrow_weights``: the model's file is quantised already; None if unknown.
    ``local``: the server runs on the client's machine. ``first_answer_ms``: the first request of all.
    """

    target: str
    model: str
    route: str
    owner: str = ""
    serve: str = ""
    is_model: bool = False
    narrow_weights: bool | None = None
    local: bool = False
    streaming: bool = True
    usage: bool = True
    fixed_length: bool = True
    max_model_len: int | None = None
    first_answer_ms: float | None = None
    network: Network
    gentle: list[Gentle] = []
    levels: list[Level] = []
    hardware: Hardware | None = None
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = []


def gentle(stage: StageResult, *, repeated: bool = False) -> Gentle:
    """A stage of one user; a repeated prompt's first request, which no cache knows yet, is left out."""
    kept = [r for r in stage.records if r.counts and r.ok and (not repeated or r.index > 0)]
    cached = [r.cached_tokens or 0 for r in kept]
    first = [r.ttft_s for r in kept if r.ttft_s is not None]
    return Gentle(
        prompt_tokens=_median([r.prompt_tokens for r in kept]) or 0.0,
        requests=len(kept),
        cached_tokens=sum(cached) / len(cached) if cached else 0.0,
        repeated=repeated,
        ttft_ms=_median([r.ttft_s for r in kept], 1000),
        ttft_mean_ms=round(1000 * statistics.fmean(first), 4) if first else None,
        tpot_ms=_median([r.tpot_s for r in kept], 1000),
        e2e_ms=_median([r.e2e_s for r in kept], 1000),
        server=stage.server,
        client=stage.client,
    )


def level(stage: StageResult, answer_ms: float | None) -> Level:
    """A stage of many users."""
    return Level(
        users=int(stage.level),
        window_s=stage.window_s,
        requests=stage.requests,
        completed=stage.completed,
        tok_s=stage.output_throughput.value,
        errors=stage.errors,
        error_examples=stage.error_examples,
        prompt_tokens=stage.prompt_tokens_mean,
        output_tokens=stage.output_tokens_mean,
        cached_share=stage.cached_share,
        ttft_ms=stage.ttft.p50 if stage.ttft is not None else None,
        ttft_mean_ms=stage.ttft.mean if stage.ttft is not None else None,
        ttft_p95_ms=stage.ttft.p95 if stage.ttft is not None else None,
        tpot_ms=stage.tpot.p50 if stage.tpot is not None else None,
        e2e_ms=stage.e2e.p50 if stage.e2e is not None else None,
        answer_ms=answer_ms,
        server=stage.server,
        client=stage.client,
    )


def _median(values: Sequence[float | None], factor: float = 1.0) -> float | None:
    known = [float(value) for value in values if value is not None]
    return round(statistics.median(known) * factor, 4) if known else None
