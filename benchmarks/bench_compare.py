"""``headrace bench`` beside another load generator, guidellm, on one server: do they measure the same?

    python -m benchmarks.bench_compare [MODEL] --guidellm PATH/TO/guidellm [--known]

guidellm lives in an environment of its own (``pip install guidellm``). One ``headrace serve`` without
prefix caching answers both: random words, the same numbers of prompt and answer tokens, the same users, in
turns. It computes with one thread on one core and the clients have the others: guidellm's processes would
otherwise take the server's time, and more of it than bench does. Printed is each one's median of the rounds
and its range, and whether the ranges overlap. guidellm's inter-token latency is the mean gap of a request,
(E2E − TTFT) / (tokens − 1), which is called TPOT here; its own TPOT divides the whole latency. Exit status
1 if a metric's ranges are more than 5% apart, or its rounds differ by so much that nothing can be said.

With ``--known`` the server is one that computes nothing and answers on time: the first token after 100 ms and
one every 20 ms. What is right is then known, and the machine hardly matters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.journey.float_model import float_folder
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError, GenerationError, HeadraceError
from headrace.lab.bench.child import running, served
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.load import Load
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.run import Asked, Target, measure
from headrace.lab.bench.session import Plan
from headrace.model import store

SERVER = Path(__file__).parent.parent / "tests" / "lab" / "streaming_server.py"
FIRST_MS, GAP_MS = 100.0, 20.0
METRICS = {"TTFT p50": "ms", "TPOT p50": "ms", "E2E p50": "ms", "output": "tok/s"}
_CLOSE = 0.05
"""Of a metric: ranges that miss each other by less say nothing, with a few rounds."""
_NOISY = 0.25
"""Of a metric: rounds of one generator that differ by more prove no agreement."""


class _Silent:
    def running(self, load: Load) -> None:
        """Nothing to show."""

    def finished(self, result: StageResult) -> None:
        """Printed at the end."""


def ours(address: str, model: str, options: argparse.Namespace, prompt_tokens: int, seed: int) -> list[float]:
    """One round of ``headrace bench``: the values of ``METRICS``."""
    import uvloop

    plan = Plan(
        kind="closed",
        levels=(options.users,),
        duration_s=None,
        requests=options.requests,
        warmup_s=0.0,
        early_stop=False,
        seed=seed,
    )
    asked = Asked(
        prompt_tokens=Lengths("fixed", prompt_tokens),
        output_tokens=Lengths("fixed", options.output_tokens),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        target = Target(name=model, address=address)
        [stage] = runner.run(measure(target, asked, plan, _Silent(), {})).stages
    assert stage.ttft and stage.tpot and stage.e2e and not stage.errors
    return [stage.ttft.p50, stage.tpot.p50, stage.e2e.p50, stage.output_throughput.value]


def theirs(
    address: str, tokenizer: Path, options: argparse.Namespace, seed: int, folder: Path
) -> tuple[list[float], int]:
    """One round of guidellm: the values of ``METRICS``, and how many tokens its prompts had."""
    path = folder / "guidellm.json"
    command = [
        *(options.guidellm, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={address},validate_backend=false"),
        *("--profile", f"kind=concurrent,streams={options.users}"),
        *("--constraint", f"kind=max_requests,count={options.requests}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={options.prompt_tokens},output_tokens={options.output_tokens}",
        *("--data-loader", f"kind=pytorch,samples={4 * options.requests},num_workers=1,prefetch_factor=8"),
        *("--seed", f"kind=static,value={seed}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--output", f"kind=json,path={path}"),
    ]
    environment = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no command {options.guidellm}; name guidellm's with --guidellm"
        ) from None
    except subprocess.TimeoutExpired:
        raise GenerationError("guidellm did not end within 300 s; lower --requests") from None
    if done.returncode:
        raise GenerationError(f"guidellm ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    [run] = json.loads(path.read_bytes())["benchmarks"]
    metrics: dict[str, Any] = run["metrics"]
    if metrics["request_totals"]["successful"] < options.requests:
        raise GenerationError(f"guidellm: requests failed: {metrics['request_totals']}")

    def of(name: str, statistic: str) -> float:
        return float(metrics[name]["successful"][statistic])

    values = [
        of("time_to_first_token_ms", "median"),
        of("inter_token_latency_ms", "median"),
        1000 * of("request_latency", "median"),
        of("output_tokens_per_second", "mean"),
    ]
    return values, round(of("prompt_token_count", "mean"))


def main() -> int:
    """Print the table; 0 if the two agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--known", action="store_true", help="a server whose times are known")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of a round")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96, help="before the chat template adds to them")
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    tokenizer = float_folder(store.resolve(options.model))
    mine: list[list[float]] = []
    other: list[list[float]] = []
    server_cores, client_cores = _cores()
    _stay_on(server_cores)  # what is started from here inherits it
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(options) as (address, _),
    ):
        _stay_on(client_cores)
        for round_ in range(options.rounds + 1):  # the first warms the server up
            values, prompt_tokens = theirs(address, tokenizer, options, round_, Path(folder))
            other.append(values)
            mine.append(ours(address, options.model, options, prompt_tokens, round_))
    print(
        f"{options.users} users, {options.rounds} rounds of {options.requests} requests, {prompt_tokens} "
        f"prompt tokens with the template, {options.output_tokens} answer tokens"
    )
    if options.known:
        e2e = FIRST_MS + GAP_MS * (options.output_tokens - 1)
        print(f"right: TTFT {FIRST_MS:g} ms, TPOT {GAP_MS:g} ms, E2E {e2e:g} ms")
    return 0 if _print(mine[1:], other[1:]) else 1


def _server(options: argparse.Namespace) -> AbstractContextManager[tuple[str, int]]:
    if not options.known:
        return served(options.model, ["--no-prefix-caching", "--threads", "1"])
    times = ("--first", str(FIRST_MS / 1000), "--gap", str(GAP_MS / 1000))
    return running([sys.executable, str(SERVER), *times], "the server whose times are known")


def _cores() -> tuple[set[int], set[int]]:
    """One core for the server, the others for the clients; the same one where there is only one."""
    if not hasattr(os, "sched_getaffinity"):
        return set(), set()
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def _stay_on(cores: set[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


def _print(mine: list[list[float]], other: list[list[float]]) -> bool:
    print(f"{'metric':10}{'headrace bench':>28}{'guidellm':>28}  agreement")
    agree = True
    for number, (name, unit) in enumerate(METRICS.items()):
        a, b = ([values[number] for values in rounds] for rounds in (mine, other))
        gap = max(min(a) - max(b), min(b) - max(a), 0.0) / statistics.median(b)
        noise = max((max(values) - min(values)) / statistics.median(values) for values in (a, b))
        agree &= gap <= _CLOSE and noise <= _NOISY
        said = "ranges overlap" if gap == 0 else f"ranges {gap:.1%} apart"
        if gap > _CLOSE:
            said += ": NO"
        elif noise > _NOISY:
            said += f", but rounds differ by {noise:.0%}: TOO NOISY TO TELL"
        print(f"{name:10}{_spread(a, unit):>28}{_spread(b, unit):>28}  {said}")
    return agree


def _spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f}) {unit}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeadraceError as error:
        print(f"bench_compare: {error.message}", file=sys.stderr)
        sys.exit(1)
