"""Prompt lookup by itself: what followed the last tokens before."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.ngram_index import HitRates, NgramIndex


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


def test_a_copy_is_followed_where_it_goes_on() -> None:
    """Of equal matches the latest won, though the text was in the middle of copying an earlier one."""
    copied = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    index = NgramIndex(2, 4)
    index.extend([*copied, 50, 4, 5, 6, 7, 60, 1, 2])
    assert index.continuation(3) == [3, 4, 5]
    index.extend([3, 4, 5, 6, 7])
    assert index.continuation(2) == [8, 9]


def test_a_copy_goes_on_behind_a_replaced_token() -> None:
    copied = list(range(10, 30))
    index = NgramIndex(3, 8)
    index.extend([*copied, 1, *copied[:3]])
    assert index.continuation(16) == copied[3:19]
    index.extend([*copied[3:9], 99])  # one token instead of the tenth
    assert index.continuation(4) == copied[10:14]


def test_a_copy_is_found_again_behind_an_insertion() -> None:
    """After a few new words three equal tokens had to come before there was a draft."""
    copied = list(range(10, 40))
    index = NgramIndex(3, 8)
    index.extend([*copied, 1, *copied[:3]])
    index.continuation(1)
    for token in [*copied[3:12], 97, 98, 99, copied[12]]:
        index.extend([token])
        index.continuation(1)
    assert index.continuation(4) == copied[13:17]


def renamed(copied: list[int], index: NgramIndex, until: int) -> None:
    """Say ``copied``, in which 7 becomes 70, 71, up to a place behind the second 7."""
    for token in copied[:until]:
        for said in [70, 71] if token == 7 else [token]:
            index.continuation(8)
            index.extend([said])


def test_what_was_renamed_is_renamed_again() -> None:
    """Each place where a name occurs cost a draft that ended there, and some tokens until the next."""
    copied = [*range(10, 22), 7, *range(22, 34), 7, *range(34, 46), 7, 46, 47]
    index = NgramIndex(3, 8)
    index.extend([*copied, 1])
    renamed(copied, index, until=20)
    assert index.continuation(9) == [*copied[20:25], 70, 71, 34, 35]
    renamed(copied[20:], index, until=17)
    assert index.continuation(5) == [*copied[37:38], 70, 71, 46, 47]


def test_a_name_that_is_copied_after_all_is_no_longer_replaced() -> None:
    copied = [*range(10, 22), 7, *range(22, 30), 7, *range(30, 38), 7, *range(38, 46), 7, 46]
    index = NgramIndex(3, 8)
    index.extend([*copied, 1])
    renamed(copied, index, until=20)
    index.extend([*copied[20:32]])
    assert index.continuation(4)[:1] == copied[32:33]
    index.extend(copied[32:39])
    assert index.continuation(2) == [7, 46]


def test_chances_grow_with_the_match_and_follow_what_came() -> None:
    copied = list(range(100, 160))
    index = NgramIndex(3, 8)
    index.extend([*copied, 1, *copied[:3]])
    index.continuation(16)
    before = index.chances(16)
    assert before[0] < before[-1] < 1
    index.extend(copied[3:40])
    index.continuation(16)
    assert min(index.chances(16)) > 0.95
    rng = random.Random(1)
    wrong = NgramIndex(2, 8)
    for _ in range(40):  # two tokens that are always followed by another one
        wrong.extend([5, 6])
        wrong.continuation(1)
        wrong.extend([rng.randrange(100, 1000)])
    wrong.extend([5, 6])
    assert wrong.continuation(1)
    assert wrong.chances(1)[0] < 0.15


def test_rates_of_other_texts_count_at_first() -> None:
    common = HitRates()
    first = NgramIndex(3, 8, common)
    text = list(range(100, 160))
    first.extend([*text, 1, *text[:3]])
    first.continuation(1)
    first.extend(text[3:])
    drafts = []
    for rates in (None, common):
        index = NgramIndex(3, 8, rates)
        index.extend([*text, 1, *text[:3]])
        index.continuation(4)
        drafts.append(index.chances(4))
    assert all(later > fresh for fresh, later in zip(*drafts, strict=True))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=30),
    st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 8)]),
)
def test_any_text_has_drafts_of_known_tokens(pieces: list[list[int]], lengths: tuple[int, int]) -> None:
    """Copies, edits and their ends in every order, at the edges of the text as well."""
    index = NgramIndex(*lengths)
    seen: set[int] = set()
    for number, piece in enumerate(pieces):
        index.extend(piece)
        seen |= set(piece)
        found = index.continuation(number % 12)
        assert len(found) <= number % 12
        assert set(found) <= seen
        chances = index.chances(len(found))
        assert len(chances) == len(found)
        assert all(0 < chance < 1 for chance in chances)


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
