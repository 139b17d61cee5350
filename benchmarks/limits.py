"""What this machine can do at most: ``python benchmarks/limits.py``, on a quiet machine.

Memory bandwidth by the size of what is read again and again, and multiply-accumulates a second from the
first-level cache, for each kernel path and number of threads. Medians of the rounds; every other result can
be given as a share of these.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from headrace.backend.cpu import _native
from headrace.backend.cpu.cores import usable_cores
from headrace.backend.cpu.limits import READ_SIZES, Limits, measure_limits

_MACS = [name for name in Limits.__dataclass_fields__ if name.endswith("_macs_per_s")]


def main() -> None:
    """Print one line for each path and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=_native.supported_isas(), help="one path; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = usable_cores()
    threads = sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < cores), cores})
    found: list[dict[str, object]] = []
    if not options.json:
        sizes = "".join(f"{size >> 20:>6} MB" for size in READ_SIZES)
        print(f"{'':12} {'threads':>7}   GB/s:{sizes}   GMAC/s: int8    bf16 float32")
    for isa in [options.isa] if options.isa else _native.supported_isas():
        for count in threads:
            rounds = [measure_limits(count, options.seconds, isa=isa) for _ in range(options.rounds)]
            reads = {size: median(r.read_bytes_per_s[size] for r in rounds) for size in READ_SIZES}
            macs = [median(getattr(r, name) for r in rounds) for name in _MACS]
            found.append(
                {
                    "isa": isa,
                    "threads": count,
                    "read_bytes_per_s": reads,
                    **dict(zip(_MACS, macs, strict=True)),
                }
            )
            if not options.json:
                read = "".join(f"{rate / 1e9:9.1f}" for rate in reads.values())
                rates = "".join(f"{rate / 1e9:8.1f}" for rate in macs)
                print(f"{isa:12} {count:>7}        {read}       {rates}", flush=True)
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
