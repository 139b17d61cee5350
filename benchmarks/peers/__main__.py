"""headrace beside other engines on this machine: ``python benchmarks/peers``, on a quiet machine.

Installs every engine from the package index into an environment of its own, converts the model into each
one's best formats, and runs the workloads with engines taking turns. What can't be installed or does not run
is a line in the results. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import catalogue
import mixed
import msgspec
from models import LargeModels, Models
from plot import write_plot
from results import Report, set_ratios
from session import Options, Session
from table import markdown
from workloads import COLD_START, GENERATED, KEYS, MIXED, quickened

from headrace.backend.cpu.limits import measure_limits
from headrace.errors import HeadraceError
from headrace.lab.bench.context import context
from headrace.model import store


def main() -> None:
    """Measure and write."""
    options = _arguments()
    variants = options.variants
    output: Path = options.output
    report = Report(
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        command=shlex.join(["python", "benchmarks/peers", *sys.argv[1:]]),
        machine=msgspec.to_builtins(context()),
        model=options.model,
        threads=options.threads,
        settings={name: getattr(options, name) for name in ("rounds", "budget", "quick", "complete", "rate")},
        limits={},
    )
    limits = measure_limits(options.threads, 1.0 if options.quick else 3.0)
    report.limits = {name: getattr(limits, name) for name in type(limits).__dataclass_fields__}
    (output / "logs").mkdir(parents=True, exist_ok=True)
    for old in (output / "logs").iterdir():
        old.unlink()

    def save() -> None:
        set_ratios(report.rows, catalogue.OURS)
        (output / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))

    settings = Options(
        threads=options.threads,
        rounds=options.rounds,
        budget_s=0.0 if options.complete else options.budget,
        timeout_s=options.timeout,
        complete=options.complete,
        output=output,
    )
    session = Session(variants, settings, report, limits, save)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        _measure(session, options, report)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        session.close()
        save()
        (output / "results.md").write_text(markdown(report))
        write_plot(report, output / "results.png")
    print(markdown(report))
    print(f"written: {output}/results.json, results.md, results.png; what engines said: {output}/logs")
    if report.interrupted:
        raise SystemExit(130)


def _measure(session: Session, options: argparse.Namespace, report: Report) -> None:
    keys = options.workloads
    workloads = [quickened(one) if options.quick else one for one in GENERATED if one.key in keys]
    models = Models(store.resolve(options.model), options.output / "logs", options.threads)
    small = [one for one in workloads if not one.large]
    if small:
        session.generated(small, models)
        session.close()
        session.compared(models)
    if COLD_START in keys:
        session.cold_starts(models)
    if MIXED in keys:
        report.titles[MIXED] = mixed.title(options.rate)
        session.mixed_loads(models, options.rate, options.duration)
    if large := [one for one in workloads if one.large]:
        session.generated(large, LargeModels(models.shipped, options.output / "logs", options.threads))
        session.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2-135m", help="of the Llama family, in 4 bits (default: %(default)s)"
    )
    parser.add_argument(
        "--peers", type=_names, help="ENGINE or ENGINE:FORMAT, with commas; ours always run as well"
    )
    parser.add_argument(
        "--workloads", type=_workloads, default=list(KEYS), help=f"of {','.join(KEYS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--budget",
        type=float,
        default=15.0,
        help="seconds after which an engine repeats a workload no more (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of H")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of H")
    parser.add_argument("--complete", action="store_true", help="every format in every workload, all rounds")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="shorter prompts and outputs, one round, no G and no H: does it run?",
    )
    parser.add_argument(
        "--add",
        type=_added,
        action="append",
        default=[],
        metavar="NAME=SCRIPT",
        help="one more engine: a script like run_transformers.py, run by this Python, model as shipped",
    )
    parser.add_argument("--output", type=Path, default=Path("bench-peers"), help="folder of the results")
    options = parser.parse_args()
    for name in ("rounds", "threads", "timeout", "rate", "duration"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be more than 0")
    if options.quick:
        options.rounds = 1
        options.workloads = [key for key in options.workloads if key not in ("G", "G16", MIXED)]
    try:
        options.variants = [*catalogue.variants(options.peers), *options.add]
    except ValueError as error:
        parser.error(str(error))
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _workloads(text: str) -> list[str]:
    keys = _names(text)
    if unknown := [key for key in keys if key not in KEYS]:
        raise argparse.ArgumentTypeError(f"there is no workload {unknown[0]!r}; there are {', '.join(KEYS)}")
    return keys


def _added(text: str) -> catalogue.Variant:
    name, _, script = text.partition("=")
    if not name or not Path(script).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=SCRIPT with a file that exists")
    peer = catalogue.Peer(name, str(Path(script).resolve()), (), ())
    return catalogue.Variant(peer, catalogue.Form("own", 16))


def _fail(message: str) -> NoReturn:
    print(f"headrace: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except HeadraceError as error:
        _fail(error.message)
