"""A diagnosis for people: the cause first, then where the time goes, then what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lab.diagnose.device_causes import of_what
from headrace.lab.diagnose.finding import Finding, ms, users
from headrace.lab.diagnose.prompts import PromptAdvice
from headrace.lab.diagnose.split import TTFTSplit
from headrace.lab.diagnose.verdict import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BAR = 22  # cells of a whole one
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PARTS = ("network", "queue", "prefill", "frontend")


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print all of it."""
    d = diagnosis
    first, *others = d.findings
    console.print(f"\n[bold]{first.title}[/bold] [dim]({first.confidence} confidence)[/dim]", highlight=False)
    served = f" on {d.engine}" if d.engine else ""
    console.print(
        f"{d.model}{served} · {d.measurements.seconds:.0f} s of load", highlight=False, markup=False
    )
    if d.ttft is not None:
        _show_ttft(d.ttft, d.ttft_loaded, console)
    if d.tpot is not None:
        _show_tpot(d, console)
    if d.utilisation is not None:
        why = f": {d.utilisation_cause}" if d.utilisation_cause else ""
        console.print(
            f"\nUtilisation: {of_what(d.utilisation.of)} {d.utilisation.share:.0%} busy{why}",
            highlight=False,
            markup=False,
        )
    _show_finding("Why", first, console)
    for finding in others:
        console.print(
            f"\n[bold]Also: {finding.title}[/bold] [dim]({finding.confidence} confidence)[/dim]",
            highlight=False,
        )
        _show_finding(None, finding, console)
    if d.notes:
        console.print("\nTo know when reading this:", highlight=False)
    for note in d.notes:
        console.print(f"  · {note}", highlight=False, markup=False)


def _show_finding(heading: str | None, finding: Finding, console: Console) -> None:
    if heading is not None:
        console.print(f"\n[bold]{heading}[/bold]")
    for line in finding.evidence:
        console.print(f"  · {line}", highlight=False, markup=False)
    console.print(f"  try:   {finding.attempt}", highlight=False, markup=False, style="green")
    console.print(f"  gains: {finding.gain}", highlight=False, markup=False)
    if heading is not None and finding.proof:
        console.print("  prove it:")
        for command in finding.proof:
            console.print(f"    {command}", highlight=False, markup=False, soft_wrap=True, style="dim")


def show_prompts(advice: PromptAdvice, ms_per_token: float | None, console: Console) -> None:
    """Print the order to write prompts in, and what it gains; ``ms_per_token``: of prefill, if measured."""
    a = advice
    how = "" if a.counted == "tokenizer" else ", estimated at four characters a token"
    of = f"{a.requests} requests" if a.requests else "a template"
    console.print(
        f"\n[bold]Prompts[/bold]: {a.source}, {of}, {a.tokens:.0f} tokens each{how}", highlight=False
    )
    now, after = (f"{n:.0f} ({n / max(a.tokens, 1):.0%})" for n in (a.cached_now, a.cached_after))
    console.print(f"  a prefix cache knows {now} of them as they are, {after} with stable text first")
    if a.gain >= 1:
        saved = f", about {ms(a.gain * ms_per_token)} of TTFT" if ms_per_token else ""
        console.print(f"  gains: {a.gain:.0f} cached tokens a request{saved}", highlight=False)
        console.print("  write them in this order:")
    else:
        console.print("  the order is good as it is:")
    for number, part in enumerate(a.parts, 1):
        kind = f"same in {part.share:.0%}" if part.stable else "varies"
        console.print(
            f"   {number}. {kind:<12} {part.tokens:>6.0f} tokens  {part.role}: {part.text}",
            highlight=False,
            markup=False,
            no_wrap=True,
            overflow="ellipsis",
            style=None if part.stable else "yellow",
        )
    for note in a.notes:
        console.print(f"  · {note}", highlight=False, markup=False)


def _show_ttft(one: TTFTSplit, loaded: TTFTSplit | None, console: Console) -> None:
    splits = [one] if loaded is None or loaded.users == one.users else [one, loaded]
    table = _table()
    table.add_column("")
    for split in splits:
        table.add_column(f"TTFT {ms(split.total_ms)} with {users(split.users)}", justify="left")
    for part in _PARTS:
        table.add_row(
            part,
            *(_cell(getattr(split, f"{part}_ms"), split.share(part)) for split in splits),
        )
    console.print()
    console.print(table)


def _show_tpot(d: Diagnosis, console: Console) -> None:
    assert d.tpot is not None
    split = d.tpot
    table = _table()
    table.add_column("")
    table.add_column(f"TPOT {ms(split.total_ms)} with {users(split.users)}", justify="left")
    whole = max(split.total_ms, 1e-9)
    table.add_row("step alone", _cell(split.alone_ms, split.alone_ms / whole))
    table.add_row("neighbours", _cell(split.neighbours_ms, split.neighbours_ms / whole))
    console.print()
    console.print(table)


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _cell(value_ms: float, share: float) -> str:
    return f"{bar(share)} {ms(value_ms):>7} {share:>4.0%}"


def bar(share: float) -> str:
    """A share of 0 to 1 as a bar, in eighths of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * _BAR * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(_BAR)
