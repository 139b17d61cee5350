"""What users see of a copy of a network in steady state: TTFT, TPOT and throughput, from its steps' times.

Continuous batching with one queue: every running sequence takes part in each decode step, and a prompt's
prefill holds all of them up for as long as it takes by itself. With ``rho``, the share of time of prefills:
``TPOT = decode step / (1 - rho)``, and a prompt waits ``rho P / 2 (1 - rho)`` for those before it (M/D/1,
Pollaczek-Khinchine) and half a decode step for the one in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1
from typing import Protocol

from headrace.lab.bench.slo import SLO

_ROUNDS = 60  # of a bisection: enough for a float's precision
_MOST_ROUNDS = 500  # of an iteration that creeps only where a copy is as good as overloaded
_CLOSE = 1e-4


class StepTimes(Protocol):
    """How long a copy's steps take."""

    def decode_step_s(self, sequences: float, context: float) -> float:
        """From one token of a sequence to its next."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """A prompt by itself, to its first token."""
        ...

    def prefill_share_s(self, tokens: int) -> float:
        """What a prompt keeps the copy from decoding."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of all copies together: so many users at a time, or so many requests a second."""

    prompt_tokens: int
    output_tokens: int
    concurrency: float | None = None
    rate: float | None = None
    slo: SLO | None = None

    @property
    def context(self) -> int:
        """The longest a sequence gets, in tokens."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Steady:
    """One copy in steady state. ``sequences``: running or waiting, on average. ``busy``: share of time."""

    sequences: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float | None  # None: one token has none
    e2e_s: float
    output_tokens_per_s: float
    busy: float

    def meets(self, slo: SLO | None) -> bool:
        """Whether the predicted means are within every limit."""
        return not self.missed(slo)

    def missed(self, slo: SLO | None) -> dict[str, float]:
        """By how much each limit is exceeded that is: 1.2 is a fifth too long."""
        if slo is None:
            return {}
        pairs = (
            ("ttft", self.ttft_s, slo.ttft_ms),
            ("tpot", self.tpot_s, slo.tpot_ms),
            ("e2e", self.e2e_s, slo.e2e_ms),
        )
        return {
            name: seconds * 1000 / limit
            for name, seconds, limit in pairs
            if seconds is not None and limit is not None and seconds * 1000 > limit
        }


def closed_loop(times: StepTimes, work: Workload, users: float) -> Steady:
    """``users`` who each ask again as soon as they are answered (Little's law: users = rate x E2E)."""
    decode = times.decode_step_s(users, work.prompt_tokens + work.output_tokens / 2)
    others = (users - 1) / users if users > 1 else 0.0  # a user does not wait for himself
    low, high = 0.0, 1 / times.prefill_share_s(work.prompt_tokens)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        in_flight = middle * _steady(times, work, decode, middle, others).e2e_s
        low, high = (middle, high) if in_flight < users else (low, middle)
    return _steady(times, work, decode, low, others, sequences=users, busy=1.0)


def open_loop(times: StepTimes, work: Workload, rate: float, most: float) -> Steady | None:
    """``rate`` requests a second, whatever answers take. None: more than ``most`` sequences would pile up."""
    if rate * times.prefill_share_s(work.prompt_tokens) >= 1:
        return None
    context = work.prompt_tokens + work.output_tokens / 2
    sequences = 0.0
    for _ in range(_MOST_ROUNDS):  # rises to the smallest fixed point: more sequences make longer steps
        decode = times.decode_step_s(max(sequences, 1.0), context)
        busy = -expm1(-sequences)  # M/G/inf is empty with probability exp(-load)
        steady = _steady(times, work, decode, rate, busy, sequences=sequences, busy=busy)
        following = rate * steady.e2e_s
        if following > most:
            return None
        if following - sequences < _CLOSE * following:
            return steady
        sequences = following
    return None


def _steady(
    times: StepTimes,
    work: Workload,
    decode_s: float,
    rate: float,
    others: float,
    *,
    sequences: float = 0.0,
    busy: float = 0.0,
) -> Steady:
    """At ``rate``, for one who meets others with a probability (or in a share of cases) of ``others``."""
    share = times.prefill_share_s(work.prompt_tokens)
    rho = min(rate * share, 1 - 1e-9) * others
    waiting = rho * share / (2 * (1 - rho))
    ttft = times.prefill_s(work.prompt_tokens) + waiting
    tpot = None
    if work.output_tokens > 1:
        ttft += others * decode_s / 2
        tpot = decode_s / (1 - rho)
    e2e = ttft + (tpot or 0.0) * (work.output_tokens - 1)
    return Steady(sequences, rate, ttft, tpot, e2e, rate * work.output_tokens, busy)
