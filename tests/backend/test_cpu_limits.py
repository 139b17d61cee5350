"""The machine's ceilings are measured, on every kernel path, and used in the right order of magnitude."""

from __future__ import annotations

import pytest

from headrace.backend.cpu import _native
from headrace.backend.cpu.limits import Limits, measure_limits

SMALL = (1 << 20, 64 << 20)


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_path_is_measured(isa: str) -> None:
    limits = measure_limits(1, 0.3, isa=isa, read_sizes=SMALL)
    assert limits.isa == isa and limits.threads == 1
    assert list(limits.read_bytes_per_s) == list(SMALL)
    # Any machine that runs this does at least a tenth of a gigabyte and of a billion operations a second;
    # none does a thousand times what the fastest does today. A loop that was optimised away would.
    assert all(1e8 < rate < 1e13 for rate in limits.read_bytes_per_s.values())
    for rate in (limits.int8_macs_per_s, limits.bf16_macs_per_s, limits.float32_macs_per_s):
        assert 1e8 < rate < 1e13
    assert limits.int8_macs_per_s > limits.vector_int8_macs_per_s / 2 > 1e8


def test_read_follows_the_size() -> None:
    limits = Limits("x", 2, {100: 50.0, 10_000: 10.0}, 1.0, 1.0, 1.0, 1.0)
    assert limits.read(1) == 50.0
    assert limits.read(1000) == pytest.approx(30.0)  # halfway, along the logarithm
    assert limits.read(10**9) == 10.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="this machine has"):
        measure_limits(1, 0.1, isa="vax")
    with pytest.raises(ValueError, match="bytes"):
        measure_limits(0, 0.1)
    with pytest.raises(ValueError, match="bytes"):
        measure_limits(1, 0.1, read_sizes=(64,))
    with pytest.raises(ValueError, match="seconds"):
        measure_limits(1, -1.0)
    with pytest.raises(ValueError, match="kind"):
        _native.measure_multiply("", threads=1, kind="int3", seconds=0.1)
