"""headrace diagnose: why is this endpoint slow, and what to try next."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import bench, options
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.lab.bench.run import Target
    from headrace.lab.diagnose.measure import Asked, Served
    from headrace.lab.diagnose.measurements import Measurements
    from headrace.lab.diagnose.report import Report


def diagnose(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|MODEL]",
            help=f"An endpoint's address, or a model to serve meanwhile (default: {DEFAULT_MODEL}).",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=2.0, metavar="SECONDS", help="Time for all of it.")] = 120.0,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Length of the hard load's prompts.")
    ] = 128,
    output_tokens: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Of its answers; default: up to 64.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Logged requests (JSON Lines) or a template: what to reorder for the prefix cache. "
            "Alone: no load.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="REF", help="Model whose tokenizer counts --prompts, and answers without usage."
        ),
    ] = None,
    model: options.EndpointModel = None,
    api_key: options.EndpointKey = None,
    route: options.EndpointRoute = None,
    timeout: options.RequestTimeout = 60.0,
    serve: options.ServeOptions = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a report.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
) -> None:
    """Find out why an endpoint is slow: load it gently, then hard, and name the bottleneck."""
    bench.need_lab("diagnose")
    from headrace.lab.bench.endpoint import looks_like_url
    from headrace.lab.bench.run import Target
    from headrace.lab.diagnose.measure import Asked
    from headrace.lab.diagnose.prompts import advise, counting, estimate
    from headrace.lab.diagnose.report import Report
    from headrace.lab.diagnose.verdict import diagnose as judge

    where = target if target is not None else DEFAULT_MODEL
    report = Report()
    if prompts is not None:  # first: mistakes in it are told before anything runs
        counted_by = tokenizer or (target if target is not None and not looks_like_url(target) else None)
        report.prompts = advise(prompts, counting(counted_by) if counted_by else estimate())
    if target is not None or prompts is None:
        asked = Asked(seconds=seconds, prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=seed)
        endpoint = Target(
            name=where, address=where, model=model, api_key=api_key, route=route, timeout_s=timeout
        )
        report.diagnosis = judge(_measure(endpoint, asked, serve, tokenizer))
    _write(report, as_json, output)


def _measure(target: Target, asked: Asked, serve: str, tokenizer: str | None) -> Measurements:
    import asyncio

    import msgspec
    from rich.console import Console

    from headrace.lab.bench.child import served
    from headrace.lab.bench.endpoint import looks_like_url
    from headrace.lab.bench.terminal import TerminalView
    from headrace.lab.diagnose.measure import measure

    count: Callable[[str], int] | None = bench.counter(tokenizer) if tokenizer else None
    is_url = looks_like_url(target.address)
    if serve and is_url:
        raise ConfigError("--serve is for a MODEL that diagnose serves itself; this endpoint runs already")
    known = None if is_url else _served(target.address, serve, asked.seconds)
    with (
        nullcontext((target.address, None)) if is_url else served(target.address, shlex.split(serve)) as (
            address,
            pid,
        )
    ):
        where = msgspec.structs.replace(target, address=address, server_pid=pid)
        view = TerminalView(Console(stderr=True))
        with asyncio.Runner(loop_factory=bench.loop_factory()) as runner:
            return runner.run(measure(where, asked, view, served=known, count_tokens=count))


def _served(model: str, serve: str, seconds: float) -> Served:
    """Fetch the model, and measure what this machine could do with it."""
    import os

    from headrace.engine.memory import weight_bytes
    from headrace.lab.diagnose.hardware import measure_hardware
    from headrace.lab.diagnose.measure import Served
    from headrace.model import store

    path = store.resolve(bench.pulled(model))
    given = re.search(r"--threads[= ](\d+)", serve)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = (int(given[1]) if given is not None else 0) or usable
    hardware = None
    if "--backend" not in serve:
        hardware = measure_hardware(path, weight_bytes(path), threads, min(0.02 * seconds, 2.0))
    return Served(options=serve, narrow_weights=path.suffix == ".gguf", hardware=hardware)


def _write(report: Report, as_json: bool, output: Path | None) -> None:
    from rich.console import Console

    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(report.json())
    if as_json:
        print(report.json().decode(), end="")
        return
    report.show(Console(width=None if sys.stdout.isatty() else 120))
    if output is not None:
        print(f"\nresult: {output}")
