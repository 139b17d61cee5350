"""The table of docs/compress.md: recipes on SmolLM2, what each costs, and whether the better one is better.

    python -m benchmarks.compress_table [--noise 0.03] [--recipes a,b] [--speed] [--output compress-table]

Dequantises the model, adds noise of 3% of each matrix's standard deviation, so that weights lie on no 4-bit
grid (``--noise 0``: leaves them as they are), and writes that in bfloat16. Each recipe is a run of
``headrace compress quantize`` or ``prune``, and two of ``headrace eval``: in float32 on torch, where only
the weights differ, and on the engine, which rounds inputs as well. Recipes with inputs of eight bits are also
run by transformers, which rounds them with one scale a token, as such files ask for.

What is finished is kept, and the next call goes on: a call may be ended at any time. At the end come the
table, the picture of what was rounded, and the bars: which recipe diverges less than which, in pairs over the
same stretches of text; divergence, size, time and memory. Exits with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compress_per_token import kl_per_token
from benchmarks.peers.float_checkpoint import write_dequantised
from headrace.lab.compress.recipe import BUILT_IN, PRUNING
from headrace.lab.compress.report import JSON_NAME, read_report
from headrace.lab.compress.speed import Speed, measure_speed
from headrace.lab.compress.sweep import PICTURE_NAME, Entry, front, picture
from headrace.lab.evaluate.divergence import Divergence, TextResult
from headrace.lab.evaluate.results import Report
from headrace.lab.evaluate.results import read_report as read_evaluation
from headrace.lab.evaluate.statistics import compare_amounts
from headrace.model import store

_ROUND = "- {{step: round, method: {method}, bits: 4, group_size: {size}, symmetric: {symmetric}}}\n"
VARIANTS = {
    "rtn-g64-symmetric": _ROUND.format(method="rtn", size=64, symmetric="true"),
    "rtn-g32": _ROUND.format(method="rtn", size=32, symmetric="false"),
    "rtn-g192": _ROUND.format(method="rtn", size=192, symmetric="false"),
    "gptq-g192": _ROUND.format(method="gptq", size=192, symmetric="false"),
    "awq-gptq": "- {step: awq}\n" + _ROUND.format(method="gptq", size=64, symmetric="false"),
}
"""Beside the built-in ones, whose 4-bit groups are of 64: 128 does not divide this model's 576 inputs."""
ORDERINGS = (
    ("rtn-int4", "rtn-g64-symmetric"),
    ("rtn-g32", "rtn-int4"),
    ("rtn-int4", "rtn-g192"),
    ("gptq-int4", "rtn-int4"),
    ("gptq-g192", "rtn-g192"),
    ("awq-int4", "rtn-int4"),
    ("rtn-int8", "rtn-int4"),
    ("gptq-int8", "rtn-int8"),
    ("mixed-int4-int8", "gptq-int4"),
    ("wanda-50", "magnitude-50"),
    ("sparsegpt-50", "magnitude-50"),
)
"""The first of each pair diverges less."""
KL = {"gptq-int8": 0.001, "smoothquant-w8a8": 0.01}
SECONDS = {"rtn-int8": 20, "rtn-int4": 20, "awq-int4": 600, "gptq-int4": 600, "gptq-int8": 600}
"""By the clock, or of all processors together, which holds on a busy machine too."""
SHARES = {"rtn-int4": 0.28, "awq-int4": 0.28, "gptq-int4": 0.28, "rtn-int8": 0.52, "gptq-int8": 0.52}
MEMORY_BYTES = 1_500_000_000
"""Beside the weights in float32."""


def source_of(model: str, noise: float, folder: Path) -> None:
    """A float checkpoint of ``model``; with noise, of weights that are not on the grid of its codes."""
    if folder.exists():
        return
    import torch
    from safetensors.torch import load_file, save_file

    unfinished = folder.with_name(f"{folder.name}.part")
    write_dequantised(store.resolve(model), unfinished, "bfloat16")
    draw = torch.Generator().manual_seed(7)
    for path in unfinished.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if noise and tensor.ndim == 2 and "embed" not in name:
                added = torch.randn(tensor.shape, generator=draw) * noise * tensor.float().std()
                tensors[name] = (tensor.float() + added).bfloat16()
        save_file(tensors, path, metadata={"format": "pt"})
    unfinished.rename(folder)


class Bench:
    """One source, its compressed models, and what was measured of them, in a folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.source = folder / "source"
        self._tokens, self._samples, self._threads = options.tokens, options.samples, options.threads
        (folder / "models").mkdir(parents=True, exist_ok=True)
        source_of(options.model, options.noise, self.source)

    def entry(self, name: str) -> Entry:
        """A recipe's outcome; it is compressed and evaluated if it has not been."""
        model = self.folder / "models" / name
        if not (model / JSON_NAME).exists():
            recipe = name
            if name in VARIANTS:
                recipe = str(self.folder / f"{name}.yaml")
                Path(recipe).write_text(f"steps:\n{VARIANTS[name]}")
            command = "prune" if name in PRUNING else "quantize"
            before = self.processor_seconds(name), _children_seconds()
            try:
                self._headrace(
                    "compress", command, self.source, "--recipe", recipe, "-o", model, "--no-eval",
                    "--samples", self._samples,
                )  # fmt: skip
            finally:
                self._seconds(name).write_text(json.dumps(before[0] + _children_seconds() - before[1]))
        report = read_report(model)
        report.evaluation = self.evaluation(name, "torch")
        return Entry(name, report)

    def evaluation(self, name: str, backend: str) -> Report:
        """Of a compressed model against the source, on the same backend."""
        path = self.folder / f"{name}.{backend}.json"
        if not path.exists():
            self._headrace(
                "eval", self.folder / "models" / name, "--against", self.source, "--suite", "perplexity",
                "--tokens", self._tokens, "--backend", backend, "-o", path,
                "--reference-logits", self.folder / f"reference.{backend}.safetensors",
            )  # fmt: skip
        found = read_evaluation(path)
        assert found is not None  # it was just written
        return found

    def per_token(self, name: str) -> float | None:
        """KL with inputs rounded as the file asks; None where it asks for nothing."""
        config = json.loads((self.folder / "models" / name / "config.json").read_text())
        groups = config.get("quantization_config", {}).get("config_groups", {}).values()
        if not any(group["input_activations"] for group in groups):
            return None
        path = self.folder / f"{name}.per-token.json"
        if not path.exists():
            found = kl_per_token(self.folder / "models" / name, self.source, self._tokens)
            path.write_text(json.dumps(found))
        return float(json.loads(path.read_text()))

    def processor_seconds(self, name: str) -> float:
        """Of all processors, for a recipe, start and writing included, and what was begun in vain."""
        path = self._seconds(name)
        return float(json.loads(path.read_text())) if path.exists() else 0.0

    def _seconds(self, name: str) -> Path:
        return self.folder / f"{name}.seconds.json"

    def speed(self, folder: Path) -> Speed:
        """How fast it is served."""
        path = self.folder / f"{folder.name}.speed.json"
        if not path.exists():
            path.write_text(measure_speed(folder, threads=self._threads).model_dump_json())
        return Speed.model_validate_json(path.read_bytes())

    def _headrace(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "headrace.cli", *map(str, arguments)]
        process = subprocess.Popen([*command, "--threads", str(self._threads)])
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was told as well; what it took counts when it is gone
            raise
        if status:
            raise subprocess.CalledProcessError(status, command)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def divergence(report: Report | None) -> Divergence:
    """What was measured on text."""
    result = None if report is None else report.suites["perplexity"].result
    assert isinstance(result, TextResult) and result.divergence is not None
    return result.divergence


def table(bench: Bench, entries: list[Entry]) -> Iterator[str]:
    """Markdown lines, the smallest first."""
    best = {entry.name for entry in front(entries)}
    timed = any(entry.report.speed for entry in entries)
    heads = [
        "recipe",
        "MiB",
        "of 16 bits",
        "KL, weights alone",
        "same top-1",
        "KL as served",
        "took",
        "of processors",
        "peak MiB",
    ]
    heads += ["first token", "a token", "8 streams"] if timed else []
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for entry in sorted(entries, key=lambda one: one.size_mib):
        report, found = entry.report, divergence(entry.report.evaluation)
        served = divergence(bench.evaluation(entry.name, "cpu")).kl
        cells = [
            f"**{entry.name}**" if entry.name in best else entry.name,
            f"{entry.size_mib:.0f}",
            f"{report.size.rounded_share:.3f}",
            f"{found.kl.value:.5f} ± {found.kl.se or 0:.5f}",
            f"{found.same_top1.value:.1%}",
            f"{served.value:.5f} ± {served.se or 0:.5f}",
            f"{report.seconds:.0f} s",
            f"{bench.processor_seconds(entry.name):.0f} s",
            f"{report.peak_memory_bytes / 2**20:.0f}",
        ]
        if timed and (speed := report.speed) is not None:
            cells += [
                f"{speed.ttft_ms:.0f} ms",
                f"{speed.tpot_ms:.1f} ms",
                f"{speed.tokens_per_second:.0f}/s",
            ]
        yield f"| {' | '.join(cells)} |"


def broken(bench: Bench, found: dict[str, Entry]) -> Iterator[str]:
    """The bars that do not hold; prints each comparison."""
    for better, worse in ORDERINGS:
        if better not in found or worse not in found:
            continue
        pair = [divergence(found[name].report.evaluation).kl_stretches for name in (better, worse)]
        compared = compare_amounts(*pair, seed=0)
        gap = f"{compared.difference.value:+.5f} ± {compared.difference.se or 0:.5f}"
        print(f"{better} - {worse}: {gap} (95%: {compared.low:+.5f} … {compared.high:+.5f})")
        if compared.high >= 0:
            yield f"{better} is not below {worse}: {gap}"
    for name, bar in KL.items():
        if name in found and not found[name].kl <= bar:
            yield f"{name}: KL {found[name].kl:.5f} is above {bar}"
    for name, entry in found.items():
        report = entry.report
        seconds = min(report.seconds, bench.processor_seconds(name))
        if name in SECONDS and seconds > SECONDS[name]:
            yield f"{name}: {seconds:.0f} s are above {SECONDS[name]}"
        if name in SHARES and report.size.rounded_share > SHARES[name]:
            yield f"{name}: {report.size.rounded_share:.3f} of 16 bits are above {SHARES[name]}"
        if report.peak_memory_bytes > 2 * report.size.source_16_bit + MEMORY_BYTES:
            yield f"{name}: {report.peak_memory_bytes / 1e9:.2f} GB at the peak"
        kl = bench.per_token(name)
        if kl is not None:
            print(f"{name}, inputs rounded per token: KL {kl:.5f}")
            if name in KL and not kl <= KL[name]:
                yield f"{name}: KL {kl:.5f} with inputs rounded per token is above {KL[name]}"


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--noise", type=float, default=0.03, help="share of a matrix's standard deviation")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--speed", action="store_true", help="also time each model on the engine")
    parser.add_argument("--recipes", default=",".join([*BUILT_IN, *VARIANTS]))
    parser.add_argument("--output", type=Path, default=Path("compress-table"))
    options = parser.parse_args()
    bench = Bench(options.output / f"noise-{options.noise:g}", options)
    entries = [bench.entry(name) for name in options.recipes.split(",")]
    for entry in entries:
        entry.report.model = options.model
        if options.speed:
            entry.report.speed = bench.speed(bench.folder / "models" / entry.name)
    for line in table(bench, entries):
        print(line)
    if options.speed:
        print(f"the source: {bench.speed(bench.source)}")
    rounded = [entry for entry in entries if entry.name not in PRUNING]
    if rounded:
        (bench.folder / PICTURE_NAME).write_bytes(picture(rounded))
    lines = list(broken(bench, {entry.name: entry for entry in entries}))
    print("\n".join(lines) or "all bars hold")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
