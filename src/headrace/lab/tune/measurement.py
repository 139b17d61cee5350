"""What a trial measures, and what it may be asked while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from headrace.lab.tune.switches import Config

PARTS = 3
"""A trial's window is looked at after each of so many equal parts: a poor one ends there."""


class Measurement(msgspec.Struct, kw_only=True, frozen=True):
    """One configuration under the load. Times in milliseconds, throughput in output tokens a second.

    ``value`` is what the search maximises: goodput (requests a second that meet the SLO) or, without an SLO,
    throughput. ``parts``: the value from the window's begin to the end of each part. ``whole``: all parts
    were measured. ``busy``: share of time in engine steps; ``memory_bytes``: of the server's processes.
    ``seconds``: what the trial took, with starting and stopping the server.
    """

    value: float
    parts: list[float]
    whole: bool
    seconds: float
    requests: int
    failed: int
    throughput: float
    goodput: float | None
    slo_attainment: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    e2e_p50_ms: float | None
    e2e_p95_ms: float | None
    busy: float | None
    cpu_cores: float | None
    memory_bytes: int | None


GoOn = Callable[[int, float], bool]
"""Told a part's number and the value so far; False ends the trial."""

Measure = Callable[[Config, GoOn], Measurement]
"""Measures a configuration. Raises HeadraceError if it cannot be served."""


class Trial(msgspec.Struct, kw_only=True, frozen=True):
    """A configuration that was tried. ``error`` says why it could not be measured."""

    number: int
    config: Config
    state: Literal["measured", "pruned", "failed"]
    measurement: Measurement | None = None
    error: str = ""
