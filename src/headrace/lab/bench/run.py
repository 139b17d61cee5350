"""From options to a result: opens the connections, finds out what the endpoint can, runs the plan."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from headrace.errors import ConfigError
from headrace.lab.bench.client import connection_trace
from headrace.lab.bench.client_floor import client_floor
from headrace.lab.bench.context import context
from headrace.lab.bench.datasets import read_dataset
from headrace.lab.bench.endpoint import Endpoint, Route, base_url, looks_like_url, probe
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.result import Measured, Result, WorkloadInfo
from headrace.lab.bench.session import Plan, Session, View, knee
from headrace.lab.bench.synthetic import Calibration, Synthetic, calibrate
from headrace.lab.bench.trace import Trace
from headrace.lab.bench.workload import Listed, Workload, read_prompts

if TYPE_CHECKING:
    import aiohttp

_NEAR = r"(localhost|127\.|::1$)"
_NOTABLE = 0.1  # share of a server's TTFT that the client may add in silence
_FEW = 100  # requests below which a p99 is hardly more than the slowest one


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """The workload's options. At most one of ``prompts``, ``dataset`` and ``trace``; else synthetic.

    ``ignore_eos``: answers to ``prompts`` and ``dataset`` are as long as they may be; to synthetic prompts
    they always are.
    """

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: float = 0.0
    turns: int = 1
    prompts: Path | None = None
    dataset: str | None = None
    trace: Path | None = None
    trace_speed: float = 1.0
    ignore_eos: bool = False


class Target(msgspec.Struct, kw_only=True, frozen=True):
    """The endpoint's options. ``name`` is what the user wrote, ``address`` where it is."""

    name: str
    address: str
    model: str | None = None
    api_key: str | None = None
    route: Route | None = None
    timeout_s: float = 120.0
    temperature: float | None = 0.0
    server_pid: int | None = None


async def measure(
    target: Target,
    asked: Asked,
    plan: Plan,
    view: View,
    settings: dict[str, Any],
    count_tokens: Callable[[str], int] | None = None,
    *,
    with_floor: bool = False,
) -> Result:
    """Run ``plan``; Ctrl-C ends it early with what there is. Raises HeadraceError if it can't begin.

    ``with_floor``: measure first, for half a second, what the client itself adds to every time.
    """
    listed = _listed(asked)
    created = datetime.datetime.now(datetime.UTC).isoformat()
    where = context()
    async with open_http(target) as http:
        endpoint = await probe_target(http, target, fixed_length=listed is None or listed.fixed_length)
        floor = await client_floor(http) if with_floor else None
        calibration = Calibration() if listed is not None else await calibrate(http, endpoint)
        workload = listed or _made_up(asked, calibration, plan.seed)
        if isinstance(workload, Trace):
            plan = _replay(plan, workload)
        elif listed is None:
            _check_fits(asked, endpoint)
        session = Session(
            http, endpoint, workload, plan, view, server_pid=target.server_pid, count_tokens=count_tokens
        )
        with ctrl_c(session.interrupt):
            await session.run()
    best = knee(session.stages) if not plan.find_rate else None
    result = Result(
        created=created,
        context=where,
        endpoint=Measured(
            target=target.name,
            model=endpoint.model,
            route=endpoint.route,
            owner=endpoint.owner,
            streaming=endpoint.streaming,
            usage=endpoint.usage,
            max_model_len=endpoint.max_model_len,
        ),
        workload=WorkloadInfo(name=workload.name, hash=workload.hash, description=_describe(asked, workload)),
        settings=settings,
        seed=plan.seed,
        slo=plan.slo,
        stages=session.stages,
        knee=best.label if best is not None else None,
        best_rate=session.best_rate,
        interrupted=session.interrupted,
        warnings=[],
        client_floor=floor,
    )
    result.warnings += _warnings(result, endpoint, workload, calibration)
    return result


def open_http(target: Target) -> aiohttp.ClientSession:
    """Connections to ``target``, as many as the load needs; close it."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=300)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=15)
    # Proxies of the environment are for the world outside, and would only slow what is near.
    outside = not re.match(_NEAR, urlsplit(base_url(target.address)).hostname or "")
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=outside, trace_configs=[connection_trace()]
    )


async def probe_target(http: aiohttp.ClientSession, target: Target, *, fixed_length: bool = True) -> Endpoint:
    """What ``target`` serves and understands. Raises as :func:`probe`."""
    return await probe(
        http,
        target.address,
        model=target.model,
        api_key=target.api_key,
        route=target.route,
        fixed_length=fixed_length,
        extra={} if target.temperature is None else {"temperature": target.temperature},
        timeout_s=target.timeout_s,
    )


@contextlib.contextmanager
def ctrl_c(interrupt: Callable[[], None]) -> Iterator[None]:
    """Calls ``interrupt`` when Ctrl-C is pressed inside."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _listed(asked: Asked) -> Listed | None:
    limit = asked.output_tokens
    most = int(limit.b if limit.kind == "uniform" else limit.a)
    if asked.prompts is not None:
        listed = read_prompts(asked.prompts, most)
    elif asked.dataset is not None:
        listed = read_dataset(asked.dataset, most)
    else:
        return None
    listed.fixed_length = asked.ignore_eos
    return listed


def _made_up(asked: Asked, calibration: Calibration, seed: int) -> Workload:
    made = Synthetic(
        asked.prompt_tokens,
        asked.output_tokens,
        calibration,
        seed=seed,
        shared_prefix=asked.shared_prefix,
        turns=asked.turns,
    )
    if asked.trace is None:
        return made
    limit = int(asked.output_tokens.a)
    return Trace(asked.trace, made, max_tokens=limit, speed=asked.trace_speed)


def _replay(plan: Plan, trace: Trace) -> Plan:
    import dataclasses

    rate = len(trace.times) / max(trace.times[-1], 1e-9) if len(trace.times) > 1 else 1.0
    return dataclasses.replace(
        plan, kind="open", levels=(rate,), times=tuple(trace.times), duration_s=None, find_rate=False
    )


def _check_fits(asked: Asked, endpoint: Endpoint) -> None:
    if endpoint.max_model_len is None:
        return
    sizes = [lengths.b if lengths.kind == "uniform" else lengths.a
             for lengths in (asked.prompt_tokens, asked.output_tokens)]  # fmt: skip
    longest = asked.turns * int(sum(sizes))
    if longest > endpoint.max_model_len:
        raise ConfigError(
            f"{asked.turns} × ({asked.prompt_tokens} + {asked.output_tokens}) tokens do not fit the "
            f"{endpoint.max_model_len} of {endpoint.model}; lower --prompt-tokens, --output-tokens or --turns"
        )


def _describe(asked: Asked, workload: Workload) -> str:
    if isinstance(workload, Trace):
        return f"trace {workload.name}, {len(workload.times)} requests"
    if isinstance(workload, Listed):
        until = "as long as asked" if workload.fixed_length else f"up to {asked.output_tokens} tokens"
        return f"{workload.name}, {len(workload)} prompts, answers {until}"
    parts = [f"{asked.prompt_tokens} prompt tokens → {asked.output_tokens} output tokens"]
    if asked.turns > 1:
        parts.append(f"{asked.turns} turns")
    if asked.shared_prefix:
        parts.append(f"{asked.shared_prefix:.0%} shared prefix")
    return ", ".join(parts)


def _close_to_the_floor(result: Result) -> list[str]:
    """Stages whose times are, to a notable part, the client's own."""
    floor = result.client_floor
    if floor is None:
        return []
    return [
        f"{stage.label}: {floor.ttft_p50_ms / stage.ttft.p50:.0%} of the median TTFT is the client's own time"
        for stage in result.stages
        if stage.ttft is not None and floor.ttft_p50_ms > _NOTABLE * stage.ttft.p50
    ]


def _warnings(result: Result, endpoint: Endpoint, workload: Workload, calibration: Calibration) -> list[str]:
    found = []
    if not endpoint.streaming:
        found.append("the endpoint does not stream: there are no TTFT, TPOT and ITL, only E2E")
    sources = {stage.token_source for stage in result.stages if stage.completed} - {"usage"}
    if sources:
        how = (
            "with the given tokenizer"
            if "tokenizer" in " ".join(sources)
            else "as chunks, which may hold several"
        )
        found.append(f"the endpoint reports no usage: tokens are counted {how}")
    if workload.fixed_length and not endpoint.fixed_length:
        found.append("the endpoint has no ignore_eos: answers may be shorter than asked for")
    if workload.fixed_length and not isinstance(workload, Listed) and not calibration.measured:
        found.append("without usage, prompt lengths are a guess: one word is taken as one token")
    target = result.endpoint.target
    local = not looks_like_url(target) or bool(re.match(_NEAR, urlsplit(base_url(target)).hostname or ""))
    load, cores = result.context.load_average, result.context.cores
    if local and load is not None and load > 0.5 * cores:
        found.append(f"the machine was busy already (load average {load:g} on {cores} cores): expect noise")
    found += [f"{s.label}: {s.client.warning}" for s in result.stages if s.client.warning]
    found += _close_to_the_floor(result)
    if isinstance(workload, Listed) and any(s.requests > len(workload) for s in result.stages):
        found.append(
            f"{workload.name} has {len(workload)} prompts, which came again: a prefix cache has seen them"
        )
    few = [stage.label for stage in result.stages if 0 < stage.completed < _FEW]
    if few:
        found.append(
            f"fewer than {_FEW} requests at {', '.join(few)}: p99 is hardly more than the slowest one"
        )
    return found
