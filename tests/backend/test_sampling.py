"""The numpy sampler: the meaning of every column of the sampling table."""

from __future__ import annotations

import pytest

from headrace.backend.sampling import Counter, philox4x32


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            0xFFFFFFFF_FFFFFFFF,
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key: int, counter: Counter, expected: Counter) -> None:
    """Random123's known-answer vectors for philox4x32, 10 rounds."""
    assert philox4x32(key, counter) == expected
