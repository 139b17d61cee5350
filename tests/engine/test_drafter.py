"""Prompt lookup by itself: what followed the last tokens before."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.ngram_index import NgramIndex


def draft(text: list[int], limit: int, shortest: int = 2, longest: int = 4) -> list[int]:
    index = NgramIndex(shortest, longest)
    index.extend(text)
    return index.continuation(limit)


def test_what_followed_before() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]
    assert draft([1, 2, 3, 4, 5, 9, 1, 2], 1) == [3]
    assert draft([1, 2, 3, 4, 5, 9, 1, 2], 0) == []


def test_the_longest_match_wins_then_the_latest() -> None:
    assert draft([7, 1, 2, 50, 8, 1, 2, 60, 9, 7, 1, 2], 1) == [50]
    assert draft([7, 1, 2, 50, 7, 1, 2, 60, 9, 7, 1, 2], 1) == [60]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 2, 4, 1], [5, 5]])
def test_nothing_to_go_by(text: list[int]) -> None:
    assert draft(text, 4) == []


def test_a_text_that_repeats_itself_goes_on() -> None:
    """The match overlaps its continuation: only three tokens were there to copy."""
    assert draft([1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft([5, 5, 5], 4) == [5, 5, 5, 5]


def naive(text: list[int], limit: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        end = text[-length:]
        for at in range(len(text) - 1, length - 1, -1):
            if text[at - length : at] == end:
                grown = [*text, text[at]]
                for _ in range(limit - 1):
                    grown.append(grown[at + len(grown) - len(text)])
                return grown[len(text) :][:limit]
    return []


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 3), max_size=24),
    st.lists(st.integers(1, 5), max_size=5),
    st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 8)]),
)
def test_as_a_plain_search(text: list[int], cuts: list[int], lengths: tuple[int, int]) -> None:
    """However the text came in pieces. (Short texts: the index looks at the last 32 occurrences only.)"""
    index = NgramIndex(*lengths)
    rest = text
    for cut in cuts:
        index.extend(rest[:cut])
        rest = rest[cut:]
    index.extend(rest)
    assert index.continuation(5) == naive(text, 5, *lengths)


def test_long_texts_in_bounded_memory() -> None:
    """The chains of a long text ran in circles once their ring had gone round."""
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(100_000)]
    tracemalloc.start()
    index = NgramIndex(3, 8)
    for start in range(0, len(text), 777):
        index.extend(text[start : start + 777])
        found = index.continuation(4)
        assert len(found) in (0, 4)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 * len(text) * 1.2 + 256 * 2**10 + 10_000
    needle = text[-1000:-980]
    index.extend([51, *needle[:10]])
    assert index.continuation(10) == needle[10:]
    index.extend([52, *text[:10]])  # too long ago
    assert index.continuation(10) != text[10:20]
