"""A plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from headrace.lab.plan.here import Measured, Prediction
from headrace.lab.plan.options import Option
from headrace.lab.plan.report import PRICES, Plan, errors, network_facts
from headrace.lab.plan.serving import Workload
from headrace.lab.plan.source import Source


def network_lines(source: Source, work: Workload, kv_value_bytes: int = 2) -> Iterator[str]:
    """What the network weighs."""
    facts = network_facts(source.network, work, kv_value_bytes)
    active = facts["active_matrix_parameters"]
    sparse = f" ({_billions(active)} active a token)" if source.network.experts is not None else ""
    yield f"{facts['name']}: {_billions(facts['parameters'])} parameters{sparse}, {facts['layers']} layers"
    weights = ", ".join(f"{_size(size)} in {name}" for name, size in facts["weight_bytes"].items())
    stored = source.stored
    if stored is not None:
        weights += f", {_size(source.network.weight_bytes(stored))} as the file stores them"
    yield f"weights: {weights}"
    yield (
        f"KV: {_size(facts['kv_bytes_per_token'])} a token, "
        f"{_size(facts['kv_bytes_per_sequence'])} a sequence of {work.context} tokens"
    )


def asked(work: Workload) -> str:
    """The workload in one line."""
    load = (
        f"{work.concurrency:g} users at a time" if work.rate is None else f"{work.rate:g} requests a second"
    )
    slo = "" if work.slo is None else f"; {work.slo}"
    return f"workload: {work.prompt_tokens} tokens in, {work.output_tokens} out, {load}{slo}"


def option_table(plan: Plan, *, everything: bool) -> Table:
    """One row a device, in its best precision; ``everything``: one for each precision too."""
    table = Table()
    for heading, side in (
        ("device", "left"),
        ("precision", "left"),
        ("devices", "left"),
        ("TTFT ms", "right"),
        ("TPOT ms", "right"),
        ("tokens/s", "right"),
        ("sequences", "right"),
        ("context", "right"),
        ("$/h", "right"),
        ("$/M tokens", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=side, no_wrap=side == "left" and bool(heading))  # type: ignore[arg-type]
    shown = set()
    for option in plan.options:
        if option.name in shown and not everything:
            continue
        shown.add(option.name)
        table.add_row(*_row(option, plan.work))
    return table


def _row(option: Option, work: Workload) -> list[str]:
    steady = option.steady
    numbers = ["", "", ""]
    if steady is not None:
        tpot = "" if steady.tpot_s is None else f"{steady.tpot_s * 1000:.1f}"
        numbers = [f"{steady.ttft_s * 1000:.0f}", tpot, f"{option.output_tokens_per_s:.0f}"]
    price, per_million = option.price_per_hour(), option.price_per_million()
    return [
        option.name,
        option.precision.name,
        _spread(option),
        *numbers,
        str(option.max_sequences * option.copies),
        str(option.max_context),
        "" if price is None or not option.fits else f"{price:.2f}",
        "" if per_million is None else f"{per_million:.2f}",
        _verdict(option, work),
    ]


def _spread(option: Option) -> str:
    parts = [f"TP {option.layout.tp}"] if option.layout.tp > 1 else []
    parts += [f"PP {option.layout.pp}"] if option.layout.pp > 1 else []
    parts += [f"DP {option.copies}"] if option.copies > 1 else []
    return f"{option.devices} ({', '.join(parts)})" if parts else str(option.devices)


def _verdict(option: Option, work: Workload) -> str:
    if option.why_not:
        return option.why_not
    if option.missed:
        return ", ".join(f"{name} {share:.1f} × the limit" for name, share in option.missed)
    return "ok" if work.slo is None else "meets the SLO"


def notes(plan: Plan) -> Iterator[str]:
    """What belongs under the table."""
    if plan.options and not plan.options[0].meets_slo:
        yield "Nothing in the table serves this workload within its limits; the nearest comes first."
    for suggestion in plan.suggestions[:3]:
        yield f"{suggestion.option.precision.name}: {suggestion.text}."
    for kind, efficiency in plan.hardware.efficiency.items():
        if any(option.device.kind == kind for option in plan.options):
            yield (
                f"Assumed of a {kind.upper()}: {efficiency.bandwidth.value:.0%} of its bandwidth, "
                f"{efficiency.compute.value:.0%} of its rate, {efficiency.memory.value:.0%} of its memory, "
                f"{efficiency.step_s.value * 1000:g} ms beside each step."
            )
    yield PRICES


def here_lines(source: Source, work: Workload, found: Prediction, measured: Measured | None) -> Iterator[str]:
    """What this machine gives."""
    limits = found.limits
    reads = ", ".join(
        f"{rate / 1e9:.0f} GB/s of {_size(size)}" for size, rate in sorted(limits.read_bytes_per_s.items())
    )
    yield f"this machine: {limits.isa}, {found.threads} threads; reads {reads}"
    yield (
        f"multiplies: {limits.int8_macs_per_s / 1e9:.0f} int8, {limits.bf16_macs_per_s / 1e9:.0f} bf16, "
        f"{limits.float32_macs_per_s / 1e9:.0f} float32, in billion multiply-adds a second"
    )
    fits = "fits" if found.fits else "does NOT fit"
    yield (
        f"memory: {_size(found.weight_bytes)} of packed matrices and {_size(found.kv_bytes)} of KV, "
        f"{_size(found.available_bytes)} available: {fits}"
    )
    if found.busy:
        yield (
            f"something computed in the minute before (load {found.load_average:.2f}): if it still does, "
            "limits, predictions and measurements mean little"
        )
    yield (
        f"predicted, alone: decode {found.decode_tokens_per_s:.1f} tokens/s, prefill "
        f"{found.prefill_tokens_per_s:.0f}"
    )
    steady = found.steady
    if steady.sequences > 1:
        tpot = "" if steady.tpot_s is None else f", TPOT {steady.tpot_s * 1000:.1f} ms"
        yield (
            f"predicted, {steady.sequences:g} users at a time: TTFT {steady.ttft_s * 1000:.0f} ms{tpot}, "
            f"{steady.output_tokens_per_s:.0f} output tokens/s"
        )
    if measured is not None:
        off = errors(found, measured)
        yield (
            f"measured,  alone: decode {measured.decode_tokens_per_s:.1f} tokens/s, prefill "
            f"{measured.prefill_tokens_per_s:.0f}; the prediction is off by {off['decode']:+.0%} and "
            f"{off['prefill']:+.0%}"
        )


def _size(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}".replace(".0 ", " ")
    return f"{size:.0f} bytes"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
