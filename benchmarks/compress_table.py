"""The table of docs/compress.md: every built-in recipe on SmolLM2, from weights that lie on no 4-bit grid.

    python benchmarks/compress_table.py [--tokens 4096] [--threads 2] [--output compress-table]

Dequantises the model, adds noise of 3% of each matrix's standard deviation, writes that in bfloat16, and
sweeps recipes over it: divergence in float32 (torch), size, time, and the speed of this machine's engine.
Then it checks which recipe must diverge less than which, and the bars on divergence, size and time. Exits
with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.float_checkpoint import write_dequantised
from headrace.lab.compress.quantize import Asked
from headrace.lab.compress.recipe import BUILT_IN
from headrace.lab.compress.sweep import Entry, sweep, table
from headrace.model import store

_ROUND = "- {{step: round, method: {method}, bits: 4, group_size: {size}, symmetric: {symmetric}}}\n"
VARIANTS = {
    "rtn-g64-symmetric": _ROUND.format(method="rtn", size=64, symmetric="true"),
    "rtn-g64": _ROUND.format(method="rtn", size=64, symmetric="false"),
    "rtn-g32": _ROUND.format(method="rtn", size=32, symmetric="false"),
    "rtn-g192": _ROUND.format(method="rtn", size=192, symmetric="false"),
    "gptq-g64": _ROUND.format(method="gptq", size=64, symmetric="false"),
    "awq-gptq-g64": "- {step: awq}\n" + _ROUND.format(method="gptq", size=64, symmetric="false"),
}
ORDERINGS = (
    ("rtn-g64", "rtn-g64-symmetric"),
    ("rtn-g32", "rtn-g64"),
    ("rtn-g64", "rtn-g192"),
    ("gptq-int4", "rtn-int4"),
    ("awq-int4", "rtn-int4"),
    ("rtn-int8", "rtn-int4"),
    ("mixed-int4-int8", "gptq-int4"),
)
"""The first of each pair diverges less."""
BARS = {"rtn-int8": 0.001, "smoothquant-w8a8": 0.01}
SECONDS = {"rtn-int8": 20, "rtn-int4": 20, "awq-int4": 600, "gptq-int4": 600}


def perturbed(source: Path, folder: Path) -> None:
    """A float checkpoint of ``source`` whose weights are not on the grid of its codes."""
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.part")
    write_dequantised(source, unfinished, "bfloat16")
    draw = torch.Generator().manual_seed(7)
    for path in unfinished.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in name:
                noise = torch.randn(tensor.shape, generator=draw) * 0.03 * tensor.float().std()
                tensors[name] = (tensor.float() + noise).bfloat16()
        save_file(tensors, path, metadata={"format": "pt"})
    unfinished.rename(folder)


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--recipes", default=",".join([*BUILT_IN, *VARIANTS]))
    parser.add_argument("--output", type=Path, default=Path("compress-table"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    source = options.output / "source"
    perturbed(store.resolve(options.model), source)
    names = options.recipes.split(",")
    for name in VARIANTS:
        (options.output / f"{name}.yaml").write_text(f"steps:\n{VARIANTS[name]}")
    recipes = [str(options.output / f"{name}.yaml") if name in VARIANTS else name for name in names]
    asked = Asked(
        model=str(source),
        recipe=recipes[0],
        output=options.output / "models",
        tokens=options.tokens,
        samples=options.samples,
        backend="torch",
        speed=True,
        threads=options.threads,
    )
    entries = []
    for entry in sweep(asked, recipes):
        entries.append(entry)
        print(
            f"{entry.name}: {entry.size_mib:.1f} MiB, KL {entry.kl:.5f}, {entry.report.seconds:.0f} s",
            flush=True,
        )
    print(table(entries))
    broken = list(_broken({entry.name: entry for entry in entries}))
    for line in broken:
        print(line)
    return 1 if broken else 0


def _broken(found: dict[str, Entry]) -> list[str]:
    lines = []
    for better, worse in ORDERINGS:
        if better in found and worse in found and not found[better].kl < found[worse].kl:
            lines.append(f"{better} ({found[better].kl:.5f}) is not below {worse} ({found[worse].kl:.5f})")
    for name, bar in BARS.items():
        if name in found and not found[name].kl <= bar:
            lines.append(f"{name}: KL {found[name].kl:.5f} is above {bar}")
    for name, bar in SECONDS.items():
        if name in found and found[name].report.seconds > bar:
            lines.append(f"{name}: {found[name].report.seconds:.0f} s are above {bar}")
    for name, share in (("rtn-int4", 0.28), ("rtn-int8", 0.535)):
        if name in found and found[name].report.size.rounded_share > share:
            lines.append(f"{name}: {found[name].report.size.rounded_share:.3f} of 16 bits are above {share}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
