"""What this machine can do at most: memory bandwidth and multiply-accumulates a second, measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log

from headrace.backend.cpu import _native

READ_SIZES = (4 << 20, 32 << 20, 96 << 20, 384 << 20)  # bytes: inside caches, about their size, far beyond


@dataclass(frozen=True, slots=True)
class Limits:
    """The ceilings of ``threads`` threads on the kernel path ``isa``.

    ``read_bytes_per_s``: by the size in bytes of the buffer that all threads read together, ascending.
    ``*_macs_per_s``: multiply-accumulates a second, from registers and the first-level cache; int8 and bf16
    in matrix registers where the path has them, and int8 in vector registers.
    """

    isa: str
    threads: int
    read_bytes_per_s: dict[int, float]
    int8_macs_per_s: float
    bf16_macs_per_s: float
    float32_macs_per_s: float
    vector_int8_macs_per_s: float

    def read(self, size_bytes: float) -> float:
        """Bytes a second at which a working set of ``size_bytes`` is read again and again.

        Between the sizes that were measured it is interpolated along the logarithm of the size.
        """
        sizes = sorted(self.read_bytes_per_s)
        rates = self.read_bytes_per_s
        for low, high in pairwise(sizes):
            if low < size_bytes < high:
                share = log(size_bytes / low) / log(high / low)
                return rates[low] + share * (rates[high] - rates[low])
        return rates[sizes[0] if size_bytes <= sizes[0] else sizes[-1]]


def measure_limits(
    threads: int, seconds: float = 3.0, *, isa: str = "", read_sizes: tuple[int, ...] = READ_SIZES
) -> Limits:
    """Measure the ceilings, in about ``seconds``; ``isa``: a kernel path, "" for the best of this CPU.

    Raises ValueError for a path that this CPU does not have, and for nonsensical threads or sizes.
    """
    isa = isa or _native.supported_isas()[0]
    part = seconds / (4 + len(read_sizes)) / 1.25  # a quarter of each part warms up

    def multiply(kind: str) -> float:
        return float(_native.measure_multiply(isa, threads=threads, kind=kind, seconds=part))

    return Limits(
        isa=isa,
        threads=threads,
        read_bytes_per_s={
            size: float(_native.measure_read(isa, threads=threads, bytes=size, seconds=part))
            for size in sorted(read_sizes)
        },
        int8_macs_per_s=multiply("int8"),
        bf16_macs_per_s=multiply("bf16"),
        float32_macs_per_s=multiply("float32"),
        vector_int8_macs_per_s=multiply("vector int8"),
    )
