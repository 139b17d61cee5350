"""Stop strings, wherever the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.stop import StopMatcher

words = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the first position at which any stop string ends; the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stop_lists, st.lists(words, max_size=8))
def test_the_cut_of_the_text_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@given(stop_lists, st.lists(words, max_size=8))
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched is not None:
            return
        seen, shown = seen + piece, shown + text
        held = seen[len(shown) :]
        assert seen == shown + held
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max((b for b in beginnings if seen.endswith(b)), key=len)
        assert held == longest


def test_a_stop_string_spread_over_many_pieces() -> None:
    assert run(["\n\nUser:"], ["Hi", "\n", "\nUs", "e", "r: more"]) == ("Hi", "\n\nUser:")


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a<") == ("a", None)
    assert matcher.push("/") == ("", None)
    assert matcher.push("b") == ("</b", None)
    assert matcher.push("<") == ("", None)
    assert matcher.finish() == "<"


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    """Looking again at the whole held-back text for every character took minutes here."""
    text, matched = run(["a" * 20_000 + "b"], ["a" * 500] * 100)
    assert matched is None
    assert text == "a" * 50_000
