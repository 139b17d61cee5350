"""Several recipes on one model: each compressed and compared, and the front that no other beats."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.lab.compress.quantize import Asked, Quantization
from headrace.lab.compress.recipe import named_recipe
from headrace.lab.compress.report import JSON_NAME, CompressReport, read_report
from headrace.lab.compress.speed import Speed
from headrace.model import store

PICTURE_NAME = "pareto.png"
TABLE_NAME = "sweep.md"
_TIMED = ("loads s", "first token ms", "ms/token", "tokens/s in 8 streams", "MiB served")


@dataclass(frozen=True, slots=True)
class Entry:
    """One recipe's outcome; ``size_mib`` and ``kl`` are what the front is of."""

    name: str
    report: CompressReport

    @property
    def size_mib(self) -> float:
        """Of the weights' files."""
        return self.report.size.weights / 2**20

    @property
    def kl(self) -> float:
        """Mean divergence from the source, nats per token."""
        text = self.report.text()
        assert text is not None and text.divergence is not None  # a sweep always compares
        return text.divergence.kl.value


def sweep(
    asked: Asked,
    recipes: Sequence[str],
    *,
    progress: store.Progress = lambda what, done, total: None,
    downloads: store.Progress | None = None,
) -> Iterator[Entry]:
    """Each recipe's outcome as it is finished, in folders of ``asked.output`` that are called as the recipes.

    What an earlier sweep finished is not done again. At the end the table and the picture are written. Raises
    what compressing raises, before the first one for all recipes' mistakes.
    """
    folder = asked.output
    names = [named_recipe(recipe)[0] for recipe in recipes]
    if len(set(names)) < len(names):
        raise ConfigError("Two recipes of the sweep have one name: rename a file.")
    folder.mkdir(parents=True, exist_ok=True)
    opened = []
    for name, recipe in zip(names, recipes, strict=True):
        mine = replace(asked, recipe=recipe, output=folder / name, overwrite=True)
        opened.append(Quantization(mine, progress=progress, downloads=downloads))
    entries = []
    for name, one in zip(names, opened, strict=True):
        report = _earlier(one)
        entries.append(Entry(name, one.run() if report is None else report))
        yield entries[-1]
    (folder / TABLE_NAME).write_text(table(entries), "utf-8")
    (folder / PICTURE_NAME).write_bytes(picture(entries))


def _earlier(one: Quantization) -> CompressReport | None:
    """What an earlier sweep left in the place, if it is of the same source, recipe, calibration and text."""
    for folder in (one.asked.output, one.refused):
        if not (folder / JSON_NAME).is_file():
            continue
        report = read_report(folder)
        if one.made(report):
            return report
    return None


def front(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no other is smaller and nearer to the source than, the smallest first."""
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda one: (one.size_mib, one.kl)):
        if not found or entry.kl < found[-1].kl:
            found.append(entry)
    return found


def table(entries: Sequence[Entry]) -> str:
    """A Markdown table, the smallest first; members of the front are marked."""
    best = {entry.name for entry in front(entries)}
    timed = any(entry.report.speed is not None for entry in entries)
    heads = ["recipe", "MiB", "of 16 bits", "KL", "same top-1", "perplexity", "took s"]
    heads += list(_TIMED) if timed else []
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in sorted(entries, key=lambda one: one.size_mib):
        report, text = entry.report, entry.report.text()
        assert text is not None and text.divergence is not None
        mark = " (front)" if entry.name in best else ""
        cells = [
            entry.name + mark + (" (refused)" if report.gate_failures else ""),
            f"{entry.size_mib:.1f}",
            f"{report.size.weights / report.size.source_16_bit:.0%}",
            f"{entry.kl:.5f} ± {text.divergence.kl.se or 0:.5f}",
            f"{text.divergence.same_top1.value:.1%}",
            f"{text.perplexity.value:.3f}",
            f"{report.seconds:.0f}",
        ]
        if timed:
            speed = report.speed
            cells += [""] * len(_TIMED) if speed is None else _timed(speed)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _timed(speed: Speed) -> list[str]:
    return [
        f"{speed.load_s:.1f}",
        f"{speed.ttft_ms:.0f}",
        f"{speed.tpot_ms:.1f}",
        f"{speed.tokens_per_second:.0f}",
        f"{speed.memory_bytes / 2**20:.0f}",
    ]


def picture(entries: Sequence[Entry]) -> bytes:
    """Size against divergence as a PNG, with the front."""
    import matplotlib
    from matplotlib.figure import Figure

    from headrace.lab.bench.plots import BLUE, ORANGE, STYLE
    from headrace.lab.bench.png import few_colours
    from headrace.lab.compress.labels import place_labels

    best = front(entries)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5), dpi=110, facecolor="white", layout="constrained")
        axis = figure.subplots()
        axis.set_title(f"{entries[0].report.model}: size against divergence from the source")
        axis.set_xlabel("weights, MiB")
        axis.set_ylabel("mean KL, nats per token")
        axis.set_yscale("log")
        axis.plot([one.size_mib for one in entries], [one.kl for one in entries], "o", color=BLUE, ms=6)
        axis.plot([one.size_mib for one in best], [one.kl for one in best], "-o", color=ORANGE, ms=7,
                  lw=1.8, label="front: nothing is smaller and nearer")  # fmt: skip
        axis.margins(x=0.15, y=0.15)
        axis.legend(loc="upper right")
        place_labels(axis, {entry.name: (entry.size_mib, entry.kl) for entry in entries})
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return few_colours(out.getvalue())
