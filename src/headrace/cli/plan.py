"""headrace plan: what a model needs, what could serve it, how fast, for how much; before buying anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace.cli import options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.lab.plan.serving import Workload
    from headrace.lab.plan.source import Source


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A known shape (llama-3.1-8b, qwen3-30b-a3b, …), a folder with config.json, a GGUF file, or "
            "a name of `headrace models list`.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Instead of MODEL: a network by its sizes.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward, of one expert.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Default: hidden / heads.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window of all layers.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of each layer.")] = None,
    active_experts: Annotated[int | None, typer.Option(min=1, help="Of them, what a token uses.")] = None,
    tied_head: Annotated[bool, typer.Option("--tied-head", help="The embedding is the output head.")] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1)] = 256,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Users at a time, each asking again when answered; default: 8.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Instead: requests a second, however many run.")] = None,
    slo: Annotated[
        str | None, typer.Option(help="Limits of the means: ttft=500ms,tpot=50ms,e2e=10s.")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML that adds to the hardware table, or replaces.")
    ] = None,
    on: Annotated[str | None, typer.Option(metavar="NAME,…", help="Only these devices of the table.")] = None,
    precision: Annotated[
        Literal["bf16", "fp8", "int8", "int4"] | None, typer.Option(help="Only this one.")
    ] = None,
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], typer.Option(help="auto: 16 bits a value; fp8: 8 bits.")
    ] = "auto",
    max_devices: Annotated[int, typer.Option(min=1, max=4096, help="At most so many together.")] = 64,
    everything: Annotated[bool, typer.Option("--all", help="Every precision of every device.")] = False,
    here: Annotated[
        bool,
        typer.Option("--here", help="This machine and our engine: measure its limits, predict from them."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --here: also measure, and say how far off it was.")
    ] = False,
    quantization: options.Quantization = None,
    threads: options.Threads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model needs, what could serve it, how fast, and what a million tokens would cost."""
    from headrace.cli.progress import download_progress
    from headrace.lab.plan.source import Sizes, find

    given = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
    others = (kv_heads, head_dim, window, experts, active_experts, tied_head or None)
    work = _workload(prompt_tokens, output_tokens, concurrency, rate, slo)
    if check and not here:
        raise ConfigError("--check measures this machine: add --here.")
    if model is not None:
        if any(value is not None for value in (*given.values(), *others)):
            raise ConfigError("Name a model or give sizes, not both.")
        with download_progress() as downloads:
            source = find(model, downloads)
    else:
        source = _by_sizes(given, Sizes, kv_heads, head_dim, window, experts, active_experts, tied_head)
    if here:
        if rate is not None:
            raise ConfigError("--here takes --concurrency, not --rate.")
        _here(source, model, work, hardware, quantization, threads, check, as_json)
        return
    if quantization is not None or threads:
        raise ConfigError("--quantization and --threads are of our own engine: add --here.")
    _elsewhere(source, work, hardware, on, precision, kv_cache_dtype, max_devices, everything, as_json)


def _workload(
    prompt_tokens: int, output_tokens: int, concurrency: int | None, rate: float | None, slo: str | None
) -> Workload:
    from headrace.lab.bench.slo import parse_slo
    from headrace.lab.plan.serving import Workload

    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency and --rate are two kinds of load: give one.")
    if rate is not None and not 0 < rate < 1e6:
        raise ConfigError(f"--rate must be above 0 and below a million, not {rate:g}.")
    users = concurrency if concurrency is not None or rate is not None else 8
    limits = None if slo is None else parse_slo(slo)
    return Workload(prompt_tokens, output_tokens, users, rate, limits)


def _by_sizes(
    given: dict[str, int | None],
    sizes: Any,
    kv_heads: int | None,
    head_dim: int | None,
    window: int | None,
    experts: int | None,
    active_experts: int | None,
    tied_head: bool,
) -> Source:
    from headrace.lab.plan.source import Source

    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        raise ConfigError("Name a model (such as llama-3.1-8b), or give sizes: " + ", ".join(missing) + ".")
    if missing:
        raise ConfigError(f"Sizes alone describe a network only if all are there: add {', '.join(missing)}.")
    network = sizes(
        **given,
        kv_heads=kv_heads or given["heads"],
        head_dim=head_dim,
        window=window,
        experts=experts,
        active_experts=active_experts,
        tied_head=tied_head,
    ).network()
    return Source(network)


def _elsewhere(
    source: Source,
    work: Workload,
    hardware: Path | None,
    on: str | None,
    precision: str | None,
    kv_cache_dtype: str,
    max_devices: int,
    everything: bool,
    as_json: bool,
) -> None:
    from headrace.lab.plan.hardware import read_hardware
    from headrace.lab.plan.options import options as ranked_options
    from headrace.lab.plan.report import Plan
    from headrace.lab.plan.sharing import suggestions
    from headrace.lab.plan.table import asked, network_lines, notes, option_table

    table = read_hardware(hardware)
    value_bytes = 1 if kv_cache_dtype == "fp8" else 2
    ranked = ranked_options(
        source.network,
        table,
        work,
        on=[name.strip() for name in on.split(",")] if on else (),
        precisions=(precision,) if precision else (),
        stored=source.stored,
        kv_value_bytes=value_bytes,
        max_devices=max_devices,
    )
    if not ranked:
        raise ConfigError(f"None of these devices has a rate for {precision}.")
    found = Plan(
        source,
        work,
        table,
        ranked,
        suggestions(source.network, table, work, ranked, value_bytes),
        value_bytes,
    )
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console

    # a pipe gets whole lines: what is cut at some width cannot be searched
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=1000, highlight=False)
    for line in (*network_lines(source, work, value_bytes), asked(work)):
        console.print(line, markup=False)
    console.print(option_table(found, everything=everything))
    for line in notes(found):
        console.print(line, markup=False)


def _here(
    source: Source,
    model: str | None,
    work: Workload,
    hardware: Path | None,
    quantization: Literal["int8", "int4"] | None,
    threads: int,
    check: bool,
    as_json: bool,
) -> None:
    from headrace.lab.plan.hardware import read_hardware
    from headrace.lab.plan.here import check_here, predict_here
    from headrace.lab.plan.report import here_as_dict
    from headrace.lab.plan.table import asked, here_lines, network_lines

    if check and (model is None or source.path is None):
        raise ConfigError("--check runs the model: it needs its weights, not sizes or a shape alone.")
    factors = read_hardware(hardware).engine
    measured = None
    if check:
        assert model is not None
        found, measured = check_here(model, work, factors, quantization=quantization, threads=threads)
    else:
        found = predict_here(source, work, factors, quantization=quantization, threads=threads)
    if as_json:
        print(json.dumps(here_as_dict(source, work, found, measured), indent=2))
        return
    lines = (*network_lines(source, work), asked(work), *here_lines(source, work, found, measured))
    print("\n".join(lines))
