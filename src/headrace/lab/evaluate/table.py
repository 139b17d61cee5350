"""A report as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lab.evaluate.divergence import TextResult
from headrace.lab.evaluate.results import ItemsResult, Report
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
            scores.add_row(name, metric, _plus_minus(estimate, 3), str(estimate.n), *_comparison(against))
        length, drift = record.result.output_tokens, record.result.output_tokens_drift
        if length is not None:
            drifted = [] if drift is None else [_plus_minus(drift, 1, sign=True)]
            scores.add_row(name, "output tokens", _plus_minus(length, 1), str(length.n), *drifted)
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
    if found is None:
        return
    table.add_row("perplexity of the reference", _plus_minus(found.reference_perplexity, 4), "")
    table.add_row("ln(PPL ratio)", _plus_minus(found.ln_ppl_ratio, 5, sign=True), "paired")
    table.add_row("KL mean", _plus_minus(found.kl, 6), "nats per token, of the reference to the model")
    spread = f"{found.kl_median:.6f}   {found.kl_p99:.4f}   {found.kl_p999:.4f}   {found.kl_max:.4f}"
    table.add_row("KL median   p99   p99.9   max", spread, "")
    table.add_row("same top-1", _plus_minus(found.same_top1, 4), "share of tokens")


def _comparison(found: Comparison | None) -> list[str]:
    if found is None:
        return []
    flips = ["", "", ""]
    if found.p_value is not None:
        flips = [str(found.gained), str(found.lost), f"{found.p_value:.2g}"]
    return [_plus_minus(found.difference, 3, sign=True), f"{found.low:+.3f} … {found.high:+.3f}", *flips]


def _compared(result: TextResult | ItemsResult) -> bool:
    return isinstance(result, ItemsResult) and result.against is not None


def _plus_minus(estimate: Estimate, digits: int, *, sign: bool = False) -> str:
    value = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return value if estimate.se is None else f"{value} ± {estimate.se:.{digits}f}"
