"""A report as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import ItemsResult, Report, Spread
from headrace.lab.evaluate.statistics import Comparison, Estimate

if TYPE_CHECKING:
    from rich.table import Table


def tables(report: Report) -> list[Table]:
    """One of texts, one of questions; each only if there is something in it. ± is one standard error."""
    from rich.table import Table

    paired = any(_compared(record.result) for record in report.suites.values())
    measures = Table("measure", "value", "of", box=None, pad_edge=False)
    scores = Table("suite", "metric", "score", "n", box=None, pad_edge=False)
    if paired:
        for title in ("difference", "95 %", "gained", "lost", "p"):
            scores.add_column(title)
    for name, record in report.suites.items():
        if isinstance(record.result, TextResult):
            _add_text(measures, record.result)
            continue
        for metric, estimate in record.result.metrics.items():
            against = (record.result.against or {}).get(metric)
            scores.add_row(name, metric, _plus_minus(estimate, 3), str(estimate.n), *_comparison(against, 3))
        for metric, spread in (record.result.spread or {}).items():
            difference = (record.result.spread_against or {}).get(metric)
            drawn = [] if difference is None else _spread(difference, sign=True)
            scores.add_row(name, f"{metric} between draws", *_spread(spread), *drawn[:1])
        length, drift = record.result.output_tokens, record.result.output_tokens_drift
        if length is not None:
            scores.add_row(
                name, "output tokens", _plus_minus(length, 1), str(length.n), *_comparison(drift, 1)
            )
    return [table for table in (measures, scores) if table.row_count]


def notes(report: Report) -> list[str]:
    """What has to be said of the numbers, a line for each suite's."""
    return [
        f"{name}: {note}"
        for name, record in report.suites.items()
        if isinstance(record.result, ItemsResult)
        for note in record.result.notes
    ]


def _add_text(table: Table, result: TextResult) -> None:
    of = (
        f"{result.perplexity.n} tokens, {result.windows} windows of {result.context_length}, "
        f"tokenizer {result.tokenizer[:8]}"
    )
    table.add_row(f"perplexity ({result.convention})", _plus_minus(result.perplexity, 4), of)
    found = result.divergence
    ratio = found or result.loss_ratio
    if ratio is not None:
        table.add_row("perplexity of the reference", _plus_minus(ratio.reference_perplexity, 4), "")
        table.add_row("ln(PPL ratio)", _plus_minus(ratio.ln_ppl_ratio, 5, sign=True), "paired")
    if found is None:
        return
    table.add_row("KL mean", _plus_minus(found.kl, 6), "nats per token, of the reference to the model")
    spread = f"{found.kl_median:.6f}   {found.kl_p99:.4f}   {found.kl_p999:.4f}   {found.kl_max:.4f}"
    table.add_row("KL median   p99   p99.9   max", spread, "")
    table.add_row("same top-1", _plus_minus(found.same_top1, 4), "share of tokens")


def _spread(found: Spread, *, sign: bool = False) -> list[str]:
    """The standard deviation and the range of draws, and how many there were."""
    plus = "+" if sign else ""
    reach = f"{found.low:{plus}.3f} … {found.high:{plus}.3f}"
    if found.sd is None:
        return [reach, "1"]
    return [f"{_plus_minus(found.sd, 3)} ({reach})", str(found.sd.n)]


def _comparison(found: Comparison | None, digits: int) -> list[str]:
    if found is None:
        return []
    flips = ["", "", ""]
    if found.p_value is not None:
        flips = [str(found.gained), str(found.lost), f"{found.p_value:.2g}"]
    interval = f"{found.low:+.{digits}f} … {found.high:+.{digits}f}"
    return [_plus_minus(found.difference, digits, sign=True), interval, *flips]


def _compared(result: TextResult | ItemsResult) -> bool:
    return isinstance(result, ItemsResult) and result.against is not None


def _plus_minus(estimate: Estimate, digits: int, *, sign: bool = False) -> str:
    value = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return value if estimate.se is None else f"{value} ± {estimate.se:.{digits}f}"
