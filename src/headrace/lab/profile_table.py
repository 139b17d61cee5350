"""A profile for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lab.profile import Profile, StepProfile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHOWN = 0.005  # of a step's time; what takes less is summed up


def show_profile(profile: Profile, console: Console) -> None:
    """One table for each kind of step, and the limits that its shares refer to."""
    limits = profile.limits
    reads = ", ".join(
        f"{rate / 1e9:.0f} GB/s over {size >> 20} MB" for size, rate in limits.read_bytes_per_s.items()
    )
    console.print(f"{profile.model} on {limits.isa}, {limits.threads} threads")
    console.print(
        f"limits: reads {reads}; multiply-accumulates {limits.int8_macs_per_s / 1e9:.0f} G/s int8, "
        f"{limits.bf16_macs_per_s / 1e9:.0f} bf16, {limits.float32_macs_per_s / 1e9:.0f} float32"
    )
    for step in profile.steps:
        console.print(_table(step))


def _table(found: StepProfile) -> Table:
    from rich.table import Table

    step, least = found.step, sum(found.least_seconds)
    tokens = step.sequences * step.new / found.seconds
    share = f"{least / found.seconds:.0%} of the limit"
    title = f"{step.name}: {found.seconds * 1e3:.2f} ms, {tokens:.0f} tokens/s, {share}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("operation")
    for heading in ("ms", "share", "GB/s", "GMAC/s", "of the limit"):
        table.add_column(heading, justify="right")
    rest = 0.0
    for operation, shortest in zip(found.operations, found.least_seconds, strict=True):
        if operation.seconds < _SHOWN * found.seconds:
            rest += operation.seconds
            continue
        table.add_row(
            operation.kind,
            f"{operation.seconds * 1e3:.3f}",
            f"{operation.seconds / found.seconds:.1%}",
            _per_second(operation.read_bytes, operation.seconds),
            _per_second(operation.macs, operation.seconds),
            f"{shortest / operation.seconds:.0%}" if shortest else "",
        )
    if rest:
        table.add_row("others", f"{rest * 1e3:.3f}", f"{rest / found.seconds:.1%}", "", "", "")
    return table


def _per_second(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.1f}" if count else ""
