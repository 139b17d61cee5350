"""The report as Markdown: first what matters, then every number."""

from __future__ import annotations

from catalogue import OURS
from results import Measured, Report, Row, Value, lower_is_better, main_value

NOTE = (
    "All formats are of the same weights, those of the 4-bit checkpoint as shipped. Formats marked "
    "*dequantised* were made from it after dequantising: an 8-bit or bf16 row holds no more information than "
    "the 4-bit checkpoint, and a 4-bit row was rounded twice."
)
READING = (
    "Values are medians of the rounds, with the lowest and the highest. *Ours is* says how many times as "
    "fast as the row our best of the same precision is: over 1 we are faster. *Of the limit* is the least "
    "time that this machine could take (weights and K and V read once a step, products at the measured peak) "
    "over the time taken, each row with its own bytes and its own multiplication."
)


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [_head(report), _summary(report)]
    for key, title in report.titles.items():
        rows = [row for row in report.rows if key in row.workloads]
        if rows:
            parts.append(_workload(key, title, rows))
    parts += [_accuracy(report), _problems(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> str:
    machine = report.machine
    reads = report.limits["read_bytes_per_s"]
    bandwidth = ", ".join(f"{rate / 1e9:.0f} GB/s over {int(size) >> 20} MB" for size, rate in reads.items())
    lines = [
        "# Engines side by side",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, "
        f"{machine['system']}, headrace {machine['headrace']}; "
        f"load average at the beginning {machine['load_average']}. {report.threads} threads each, greedy, "
        f"{report.model}; {report.created}.",
        f"Limits measured on it: {bandwidth}; {report.limits['int8_macs_per_s'] / 1e9:.0f} GMAC/s int8, "
        f"{report.limits['bf16_macs_per_s'] / 1e9:.0f} GMAC/s bf16.",
        f"`{report.command}`",
    ]
    if report.interrupted:
        lines.append("**Interrupted: what follows is incomplete.**")
    return "\n\n".join([*lines, NOTE, READING])


def _summary(report: Report) -> str:
    """Our best beside the best peer, whatever their precision."""
    lines = [
        "## Our best and the best peer, of any precision",
        _line("", "workload", "value", "ours", "best peer", "ours is"),
        "|---|---|---|---|---|---|",
    ]
    for key, title in report.titles.items():
        names = {name for row in report.rows if key in row.workloads for name in row.workloads[key].values}
        for name in sorted(names & set(_SUMMARISED)):
            ours, peer = (
                _best([row for row in report.rows if (row.engine == OURS) is mine], key, name)
                for mine in (True, False)
            )
            if ours is None:
                continue
            ratio = "" if peer is None else f"{_times(name, ours[1], peer[1]):.2f} ×"
            lines.append(
                _line(key, title, name, _told(ours), "none measured" if peer is None else _told(peer), ratio)
            )
    return "\n".join(lines)


_SUMMARISED = (
    "decode, tokens/s",
    "prefill, tokens/s",
    "output, tokens/s",
    "cold, s",
    "primed, s",
    "first token, s",
    "peak memory, MB",
    "TTFT p99, ms",
    "TPOT p99, ms",
    "goodput, requests/s",
)


def _best(rows: list[Row], key: str, name: str) -> tuple[str, Value] | None:
    found = [
        (row.name, row.workloads[key].values[name])
        for row in rows
        if key in row.workloads and name in row.workloads[key].values
    ]
    if not found:
        return None
    pick = min if lower_is_better(name) else max
    return pick(found, key=lambda one: one[1].median)


def _times(name: str, ours: Value, peer: Value) -> float:
    """How many times as fast (or as small) ours is."""
    one, other = (peer, ours) if lower_is_better(name) else (ours, peer)
    return one.median / other.median if other.median else float("inf")


def _told(best: tuple[str, Value]) -> str:
    return f"{_number(best[1].median)} ({best[0]})"


def _workload(key: str, title: str, rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.workloads[key].values))
    lines = [
        f"## {key}: {title}",
        _line("engine", "format", "weights", *names, "ours is", "of the limit", "rounds"),
        "|---|---|---|" + "---|" * (len(names) + 3),
    ]
    for bits in (4, 8, 16):
        same = [row for row in rows if row.bits == bits]
        if same:
            lines.append(_line(f"*{bits} bits*", *[""] * (len(names) + 5)))
        for row in sorted(same, key=lambda row: _rank(row.workloads[key])):
            found = row.workloads[key]
            size = found.weights_bytes or row.weights_bytes
            lines.append(
                _line(
                    f"**{row.engine}**" if row.engine == OURS else row.engine,
                    row.format if row.made_from == "as shipped" else f"{row.format}, {row.made_from}",
                    f"{size / 1e6:.0f} MB" if size else "",
                    *(_spread(found.values.get(name)) for name in names),
                    "" if found.ratio is None else f"{found.ratio:.2f} ×",
                    "" if found.share is None else f"{found.share:.0%}",
                    str(main_value(found)[1].rounds),
                )
            )
    return "\n".join(lines)


def _rank(found: Measured) -> float:
    name, value = main_value(found)
    return value.median if lower_is_better(name) else -value.median


def _spread(value: Value | None) -> str:
    if value is None:
        return ""
    if value.low == value.high:
        return _number(value.median)
    return f"{_number(value.median)} ({_number(value.low)}–{_number(value.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _accuracy(report: Report) -> str:
    rows = [row for row in report.rows if row.greedy_ids]
    if not rows:
        return ""
    lines = [
        "## Sanity: distance from float32 weights, and the first greedy tokens",
        _line("engine", "format", "version", "KL, mean", "KL, largest", "same top token", "continuation"),
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = ["not compared", "", ""]
        if (found := row.accuracy) is not None:
            told = [
                f"{found.kl_mean:.4f}",
                f"{found.kl_max:.3f}",
                f"{found.same_top1:.0%} of {found.positions}",
            ]
        text = " ".join(row.greedy_text.split()).replace("|", "\\|")
        lines.append(_line(row.engine, row.format, row.version, *told, text))
    return "\n".join(lines)


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    return "\n".join(["## Not measured", *(f"- {problem}" for problem in report.problems)])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
