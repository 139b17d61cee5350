"""The journey in the terminal, as one page and as a picture."""

from __future__ import annotations

import html
from pathlib import Path

from benchmarks.journey.picture import picture
from benchmarks.journey.results import Journey, StepResult

COLUMNS = (
    "step",
    "cores",
    "tok/s",
    "$/M tokens",
    "TTFT p50",
    "TPOT p50",
    "E2E p50",
    "KL to float32",
    "same top-1",
)
_WIDTHS = (20, 6, 8, 11, 9, 9, 9, 19, 11)


def cells(step: StepResult) -> list[str]:
    """A row, in the order of ``COLUMNS``; an en dash where nothing was measured."""
    accuracy = step.accuracy
    return [
        step.name,
        _number(step.cores, "{:.2f}"),
        _number(step.tokens_per_s, "{:.1f}"),
        _number(step.dollars_per_million, "{:.2f}"),
        _number(step.ttft_ms, "{:.0f} ms"),
        _number(step.tpot_ms, "{:.1f} ms"),
        _number(step.e2e_ms, "{:.0f} ms"),
        f"{accuracy.kl:.5f} ± {accuracy.kl_error:.5f}" if accuracy else "–",
        f"{accuracy.same_top1:.1%}" if accuracy else "–",
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def print_head(journey: Journey) -> None:
    """Before the first step."""
    context = journey.context
    print(f"{journey.model} · {context.cpu} · {context.cores} cores · ${journey.price_per_hour}/hour")
    print(_line(list(COLUMNS)), flush=True)


def print_step(step: StepResult) -> None:
    """A row of the table, or why there is none."""
    if step.skipped:
        print(f"{step.name:{_WIDTHS[0]}} left out: {step.skipped}", flush=True)
    else:
        print(_line(cells(step)) + (f"  {step.failed} failed" if step.failed else ""), flush=True)


def print_tail(journey: Journey, folder: Path) -> None:
    """After the last."""
    for sentence in [*journey.promises, *notes(journey)]:
        print(sentence)
    print(
        f"result: {folder / 'journey.json'}\nreport: {folder / 'journey.html'}\n"
        f"picture: {folder / 'journey.png'}"
    )


def _line(row: list[str]) -> str:
    first, *rest = row
    return f"{first:{_WIDTHS[0]}}" + "".join(
        f"{cell:>{w}}" for cell, w in zip(rest, _WIDTHS[1:], strict=True)
    )


def notes(journey: Journey) -> list[str]:
    """What the numbers mean."""
    rate = "–" if journey.rate is None else f"{journey.rate:g}"
    found = [
        f"cores, tok/s and $ at full load ({journey.users} users, closed loop); times at equal load: an open "
        f"loop of {rate} requests/s, which the baseline sustains",
        f"$ per million output tokens at ${journey.price_per_hour}/hour: {journey.price_source}",
        "KL: nats a token, of the float32 computation of the baseline's weights to the step. A GGUF file's "
        "baseline has its weights dequantised: the KL shows what computing with them costs, not what "
        "quantising them once did",
    ]
    load = journey.context.load_average
    if load is not None and load > 0.5 * journey.context.cores:
        found.append(f"the machine was busy already (load average {load:g}): expect noise")
    if journey.settings.get("quick"):
        found.append("--quick: the loads were too short to measure anything")
    if journey.interrupted:
        found.append("interrupted: what was measured until then is shown")
    return found


def write(journey: Journey, folder: Path) -> None:
    """journey.png, journey.html, which needs nothing beside it, and journey.md, the table for other pages."""
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, *map(cells, journey.measured()))]
    lines.insert(1, f"|---{'|--:' * (len(COLUMNS) - 1)}|")
    lines += ["", *(f"- {sentence}" for sentence in [*journey.promises, *notes(journey)])]
    (folder / "journey.md").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "journey.png").write_bytes(picture(journey, "png"))
    svg = picture(journey, "svg").decode()
    (folder / "journey.html").write_text(_page(journey, svg[svg.index("<svg") :]), "utf-8")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22282d; background: #fff; max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.where, .small { color: #555e66; } .scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e8eb; }
th { color: #555e66; }
th:first-child, td:first-child, .plain td, .plain th { text-align: left; white-space: normal; }
@media (prefers-color-scheme: dark) {
  body { color: #e3e7ea; background: #16191c; } .where, .small, th { color: #a4adb5; }
  th, td { border-color: #343b41; } svg { background: #fff; border-radius: 6px; }
}
"""


def _page(journey: Journey, svg: str) -> str:
    def row(tag: str, texts: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    context = journey.context
    rows = [row("td", cells(step)) for step in journey.measured()]
    left_out = [f"{step.name}: left out, {step.skipped}" for step in journey.steps if step.skipped]
    commands = [row("td", [step.name, step.why, step.command]) for step in journey.measured()]
    sentences = "".join(f"<li>{html.escape(text)}</li>" for text in [*journey.promises, *left_out])
    small = "".join(f"<li>{html.escape(text)}</li>" for text in notes(journey))
    versions = ", ".join(f"{name} {version}" for name, version in journey.versions.items())
    where = (
        f"{context.machine} · {context.cpu} · {context.cores} cores · "
        f"{journey.created[:16].replace('T', ' ')} UTC · headrace {context.headrace}, {versions} · "
        f"seed {journey.seed}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(journey.model)}: the journey</title><style>{_STYLE}</style></head><body>"
        f'<h1>{html.escape(journey.model)}: the journey</h1><p class="where">{html.escape(where)}</p>'
        f"<ul>{sentences}</ul>{svg}"
        f'<div class="scroll"><table>{row("th", list(COLUMNS))}{"".join(rows)}</table></div>'
        f'<ul class="small">{small}</ul><h2>The steps</h2>'
        f'<div class="scroll"><table class="plain">{row("th", ["step", "what changes", "server"])}'
        f"{''.join(commands)}</table></div></body></html>\n"
    )
