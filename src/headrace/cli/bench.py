"""headrace bench: load an endpoint, see what its users would; compare two measurements."""

from __future__ import annotations

import re
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace.cli import options
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.lab.bench.result import Result
    from headrace.lab.bench.run import Asked
    from headrace.lab.bench.session import Plan

_NOT_COMPARABLE = 2


def bench(
    target: Annotated[
        str,
        typer.Argument(metavar="URL|MODEL", help="An endpoint's address, or a model to serve meanwhile."),
    ] = DEFAULT_MODEL,
    concurrency: Annotated[
        str, typer.Option(help="Closed loop: users at a time, one stage each.", metavar="N,N,…")
    ] = "1,4,16",
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop instead: requests a second, one stage each.", metavar="R,R,…"),
    ] = None,
    arrivals: options.Arrivals = "poisson",
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that meets --slo.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a JSON Lines file with a timestamp a line.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, help="2 replays twice as fast.")] = 1.0,
    duration: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Window of a stage.")] = 15.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="End a stage after so many requests, not by time.")
    ] = None,
    warmup: options.Warmup = 2.0,
    prompt_tokens: options.PromptTokens = "128",
    output_tokens: options.OutputTokens = "64",
    shared_prefix: options.SharedPrefix = 0.0,
    turns: options.Turns = 1,
    prompts: options.Prompts = None,
    dataset: options.Dataset = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Full-length answers to --prompts and --dataset too.")
    ] = False,
    slo: Annotated[str | None, typer.Option(help="Objectives, such as ttft=500ms,tpot=50ms,e2e=10s.")] = None,
    slo_attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet them in --find-rate.")
    ] = 0.9,
    early_stop: Annotated[bool, typer.Option(help="End the sweep once more load brings no more.")] = True,
    model: options.EndpointModel = None,
    api_key: options.EndpointKey = None,
    route: options.EndpointRoute = None,
    temperature: Annotated[
        float, typer.Option(min=-1.0, max=2.0, help="Of sampling; -1 leaves it to the server.")
    ] = 0.0,
    timeout: options.RequestTimeout = 120.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer counts answers without usage.", metavar="REF")
    ] = None,
    serve: options.ServeOptions = "",
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and arrivals.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Result file (.json); report and picture go beside it.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Where the steps of our own engine spend their time, with a MODEL."),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Compare two results; exit status 1: B is worse."),
    ] = None,
) -> None:
    """Measure latency and throughput of an OpenAI-compatible endpoint, or of a model served meanwhile."""
    if compare is not None:
        _compare(*compare)
    if profile:
        _profile(target, serve, output)
    need_lab("bench")
    if [prompts, dataset, trace].count(None) < 2:
        raise ConfigError("--prompts, --dataset and --trace exclude each other: choose one")
    if output is not None and output.suffix != ".json":
        raise ConfigError(f"--output {output}: the result is a .json file")
    from headrace.lab.bench.lengths import parse_lengths
    from headrace.lab.bench.run import Asked
    from headrace.lab.bench.session import Plan
    from headrace.lab.bench.slo import parse_slo

    asked = Asked(
        prompt_tokens=parse_lengths(prompt_tokens, "--prompt-tokens"),
        output_tokens=parse_lengths(output_tokens, "--output-tokens"),
        shared_prefix=shared_prefix,
        turns=turns,
        prompts=prompts,
        dataset=dataset,
        trace=trace,
        trace_speed=trace_speed,
        ignore_eos=ignore_eos,
    )
    is_open = rate is not None or find_rate
    plan = Plan(
        kind="open" if is_open else "closed",
        levels=_numbers(rate, "--rate") if rate else () if find_rate else _users(concurrency),
        duration_s=None if requests is not None else duration,
        requests=requests,
        warmup_s=warmup,
        arrivals=arrivals,
        slo=parse_slo(slo) if slo else None,
        attainment=slo_attainment,
        find_rate=find_rate,
        early_stop=early_stop,
        seed=seed,
    )
    settings = {
        "arrivals": arrivals if is_open else None,
        "duration_s": plan.duration_s,
        "requests": requests,
        "warmup_s": warmup,
        "temperature": temperature,
        "timeout_s": timeout,
        "ignore_eos": ignore_eos or None,
        "serve": serve or None,
        "command": shlex.join(["headrace", *without_key(sys.argv[1:])]),
    }
    result = _measure(
        target, asked, plan, settings, serve, tokenizer, model, api_key, route, temperature, timeout
    )
    _write(
        result,
        output or Path(f"bench-{file_name(result.endpoint.model)}-{time.strftime('%Y%m%d-%H%M%S')}.json"),
    )
    if not any(stage.completed for stage in result.stages):
        raise HeadraceError("no request was answered; what failed is above and in the report")


def _measure(
    target: str,
    asked: Asked,
    plan: Plan,
    settings: dict[str, Any],
    serve: str,
    tokenizer: str | None,
    model: str | None,
    api_key: str | None,
    route: Literal["chat", "completions"] | None,
    temperature: float,
    timeout: float,
) -> Result:
    import asyncio

    from rich.console import Console

    from headrace.lab.bench.child import served
    from headrace.lab.bench.endpoint import looks_like_url
    from headrace.lab.bench.run import Target, measure
    from headrace.lab.bench.terminal import TerminalView

    count = counter(tokenizer) if tokenizer else None
    is_url = looks_like_url(target)
    if serve and is_url:
        raise ConfigError("--serve is for a MODEL that bench serves itself; this endpoint runs already")
    with (
        nullcontext((target, None)) if is_url else served(pulled(target), shlex.split(serve)) as (
            address,
            pid,
        )
    ):
        where = Target(
            name=target,
            address=address,
            model=model,
            api_key=api_key,
            route=route,
            timeout_s=timeout,
            temperature=None if temperature < 0 else temperature,
            server_pid=pid,
        )
        view = TerminalView(Console(stderr=True))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(measure(where, asked, plan, view, settings, count, with_floor=True))


def _write(result: Result, path: Path) -> None:
    from rich.console import Console

    from headrace.lab.bench.report import write_report
    from headrace.lab.bench.result import write
    from headrace.lab.bench.terminal import show

    write(result, path)
    report = write_report(result, path.with_suffix(""))
    width = None if sys.stdout.isatty() else 200
    show(result, Console(width=width))
    print(f"result: {path}\nreport: {report}")


def _compare(before: Path, after: Path) -> None:
    """Print the comparison and exit: 0 not worse, 1 worse, 2 not comparable."""
    from rich.console import Console

    from headrace.lab.bench.compare import compare
    from headrace.lab.bench.result import ResultError, read
    from headrace.lab.bench.terminal import show_comparison

    try:
        found = compare(read(before), read(after))
    except ResultError as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        raise typer.Exit(_NOT_COMPARABLE) from None
    show_comparison(found, Console(width=None if sys.stdout.isatty() else 160))
    raise typer.Exit(1 if found.verdict == "worse" else 0)


def _profile(target: str, serve: str, output: Path | None) -> None:
    """Print a profile and exit."""
    import json

    from rich.console import Console

    from headrace.lab.bench.endpoint import looks_like_url
    from headrace.lab.profile import profile_model
    from headrace.lab.profile_table import show_profile
    from headrace.model import store

    if looks_like_url(target):
        raise ConfigError("--profile runs a MODEL in this process; it can't look into an endpoint")
    settings = _profile_settings(serve)
    found = profile_model(store.resolve(pulled(target)), name=target, **settings)
    show_profile(found, Console(width=None if sys.stdout.isatty() else 120))
    if output is not None:
        output.write_text(json.dumps(found.as_json(), indent=1))
    raise typer.Exit


def _profile_settings(serve: str) -> dict[str, Any]:
    """What of ``--serve`` counts for a profile. Raises ConfigError for anything else."""
    words = shlex.split(serve.replace("=", " "))
    given = dict(zip(words[::2], words[1::2], strict=False))
    threads, quantization = given.pop("--threads", "0"), given.pop("--quantization", None)
    if given or len(words) % 2 or not threads.isdecimal() or quantization not in (None, "int8", "int4"):
        raise ConfigError(
            f"--serve {serve!r}: a profile takes --threads N and --quantization int8 or int4, nothing else"
        )
    return {"threads": int(threads), "quantization": quantization}


def need_lab(command: str, *more: str) -> None:
    """Raise ConfigError unless the packages of the lab extra that ``command`` imports are installed."""
    import importlib.util

    names = ("aiohttp", "hdrh", "matplotlib", *more)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}: pip install 'headrace[lab]'")


def pulled(model: str) -> str:
    """Fetch the model here, where its progress is seen, before the server starts."""
    from headrace.cli.progress import download_progress
    from headrace.model import store

    with download_progress() as progress:
        store.resolve(model, progress=progress)
    return model


def counter(reference: str) -> Callable[[str], int]:
    """Counts the tokens of a text as a model's tokenizer does."""
    from headrace.frontend.tokenizer import load_tokenizer
    from headrace.model import store

    tokenizer = load_tokenizer(store.resolve(reference))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def loop_factory() -> Any:
    """Of the quickest event loop at hand; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < value <= 1e5 for value in found) or list(found) != sorted(set(found)):
        raise ConfigError(f"{option}: {text!r} is not a rising list of numbers above 0, such as 1,4,16")
    return found


def _users(text: str) -> tuple[float, ...]:
    found = _numbers(text, "--concurrency")
    if any(value != int(value) or value > 4096 for value in found):
        raise ConfigError(f"--concurrency: {text!r}: users are whole numbers up to 4096")
    return found


def file_name(model: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-.")[-60:] or "model"


def without_key(arguments: list[str]) -> list[str]:
    """The command as the result keeps it: keys stay out of files."""
    kept = []
    hide = False
    for argument in arguments:
        kept.append("…" if hide else re.sub(r"^(--api-key=).*", r"\1…", argument))
        hide = argument == "--api-key"
    return kept
