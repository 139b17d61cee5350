"""A measurement as a file: everything that is needed to read it, compare it and repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.lab.bench.client_floor import ClientFloor
from headrace.lab.bench.context import Context
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.slo import SLO

SCHEMA = "headrace-bench/1"


class ResultError(HeadraceError):
    """A file that holds no measurement, or two that can't be compared."""

    code = "bench_result"


class Measured(msgspec.Struct, kw_only=True):
    """What was measured. ``target`` is the address, or the model that was served for it."""

    target: str
    model: str
    route: str
    owner: str
    streaming: bool
    usage: bool
    max_model_len: int | None


class WorkloadInfo(msgspec.Struct, kw_only=True):
    """What was asked: equal hashes, equal prompts."""

    name: str
    hash: str
    description: str


class Result(msgspec.Struct, kw_only=True):
    """One run. ``knee``: label of the stage with the best throughput for its latency. ``best_rate``: the
    highest rate that met the SLO, when it was searched for. ``client_floor``: None if it was not measured.
    """

    schema: str = SCHEMA
    created: str
    context: Context
    endpoint: Measured
    workload: WorkloadInfo
    settings: dict[str, Any]
    seed: int
    slo: SLO | None
    stages: list[StageResult]
    knee: str | None
    best_rate: float | None
    interrupted: bool
    warnings: list[str]
    client_floor: ClientFloor | None = None


def write(result: Result, path: Path) -> None:
    """Write ``result``; times of requests to 10 microseconds."""
    for stage in result.stages:
        for record in stage.records:
            record.chunk_s = [round(at, 5) for at in record.chunk_s]
            for name in ("scheduled_s", "sent_s", "end_s"):
                setattr(record, name, round(getattr(record, name), 6))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(result) + b"\n")


def read(path: Path) -> Result:
    """A measurement from its file. Raises ResultError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path} can't be read: {error.strerror}") from None
    try:
        schema = msgspec.json.decode(content, type=dict[str, Any]).get("schema")
        if schema != SCHEMA:
            raise ResultError(f"{path} is no result of headrace bench (schema {schema!r}, not {SCHEMA!r})")
        return msgspec.json.decode(content, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path} is no result of headrace bench: {error}") from None
