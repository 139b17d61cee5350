"""python -m benchmarks.journey [MODEL]: from a plain transformers server to all of headrace's switches.

Each step changes one thing and is measured under the same load: a help desk's chat, every request with one
long system prompt. Full load (a closed loop of --users) gives throughput, the cores in use and the cost; an
open loop at a rate that the baseline sustains gives latencies at equal load. Writes journey.json, .html, .md
and .png, and each load's bench result, into --output. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.journey import run, view
from benchmarks.journey.accuracy import Judge
from benchmarks.journey.float_model import float_folder
from benchmarks.journey.results import Journey, StepResult
from benchmarks.journey.steps import STEPS, serve_options, servers
from headrace.engine.config import DEFAULT_MODEL
from headrace.errors import ConfigError, HeadraceError
from headrace.lab.bench.context import context
from headrace.model import store

PRICE_PER_CORE_HOUR = 0.0513
PRICE_SOURCE = "list price of a vCPU of AWS c7a (AMD EPYC; us-east-1, on demand, January 2024)"


def main() -> int:
    """Run it; 0 if every step was measured or left out for a reason, 130 if it was interrupted."""
    options = _options()
    sizes = run.QUICK if options.quick else run.Sizes()
    if options.users:
        sizes = dataclasses.replace(sizes, users=options.users)
    if options.duration:
        sizes = dataclasses.replace(
            sizes, closed_s=options.duration, open_s=2.5 * options.duration, requests=None
        )
    began = time.monotonic()
    own = store.resolve(options.model)
    float_model = float_folder(own)
    where = context()
    price = options.price_per_hour or PRICE_PER_CORE_HOUR * where.cores
    journey = Journey(
        created=datetime.datetime.now(datetime.UTC).isoformat(),
        context=where,
        versions={name: metadata.version(name) for name in ("torch", "transformers")},
        model=options.model,
        seed=options.seed,
        settings={**dataclasses.asdict(sizes), "dtype": options.dtype, "quick": options.quick},
        users=sizes.users,
        price_per_hour=round(price, 4),
        price_source="--price-per-hour" if options.price_per_hour else f"{where.cores} × {PRICE_SOURCE}",
    )
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / ".reference-logits"
    scratch.unlink(missing_ok=True)
    view.print_head(journey)

    def report(step: StepResult) -> None:
        journey.seconds = run.elapsed_since(began)
        (folder / "journey.json").write_bytes(msgspec.json.format(msgspec.json.encode(journey), indent=1))
        view.print_step(step)

    judge = Judge(float_model, sizes.accuracy_tokens, options.seed, scratch)
    steps = servers(STEPS, float_model, own, serve_options())
    try:
        run.Runner(journey, folder, sizes, judge, report).run(float_model, steps)
    finally:
        scratch.unlink(missing_ok=True)
    if not journey.measured():
        raise HeadraceError("interrupted before the first step was measured: nothing is kept")
    (folder / "journey.json").write_bytes(msgspec.json.format(msgspec.json.encode(journey), indent=1))
    view.write(journey, folder)
    view.print_tail(journey, folder)
    return 130 if journey.interrupted else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.journey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="a GGUF Llama, or a Transformers folder"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds a step: to see that it runs, not to measure"
    )
    parser.add_argument("--duration", type=float, help="seconds of full load a step (default: 16)")
    parser.add_argument("--users", type=int, help="of the closed loop (default: 8)")
    parser.add_argument(
        "--price-per-hour", type=float, help=f"of this machine (default: cores × {PRICE_SOURCE})"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the baseline"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("journey"), metavar="FOLDER")
    options = parser.parse_args()
    if options.users is not None and not 1 <= options.users <= 256:
        raise ConfigError(f"--users {options.users}: a number from 1 to 256")
    if options.duration is not None and not 0.5 <= options.duration <= 3600:
        raise ConfigError(f"--duration {options.duration}: seconds, from 0.5 to 3600")
    if options.price_per_hour is not None and not 0 < options.price_per_hour < 1e6:
        raise ConfigError(f"--price-per-hour {options.price_per_hour}: dollars an hour, above 0")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: a whole number of 0 or more")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeadraceError as error:
        print(f"journey: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
