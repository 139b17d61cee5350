"""The event parser: the same events however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lab.bench.sse import MAX_EVENT_BYTES, EventParser, EventTooLongError

_STREAM = (
    '\ufeff: comment\r\n\r\nevent: x\ndata: {"a": "é日"}\r\rdata:one\ndata\ndata: two\n\n\nid: 3\n\n'
    "data: [DONE]\r\n\r\ndata: last"
).encode()
_EVENTS = ['{"a": "é日"}'.encode(), b"one\n\ntwo", b"[DONE]", b"last"]


@given(st.lists(st.integers(0, len(_STREAM)), max_size=12))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    parser, found = EventParser(), []
    edges = [0, *sorted(cuts), len(_STREAM)]
    for begin, end in itertools.pairwise(edges):
        found += parser.feed(_STREAM[begin:end])
    assert found + parser.finish() == _EVENTS


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_no_bytes_break_it(pieces: list[bytes]) -> None:
    whole, cut = EventParser(), EventParser()
    expected = whole.feed(b"".join(pieces)) + whole.finish()
    assert [event for piece in pieces for event in cut.feed(piece)] + cut.finish() == expected


def test_a_line_without_an_end_is_given_up() -> None:
    parser = EventParser()
    with pytest.raises(EventTooLongError):
        for _ in range(MAX_EVENT_BYTES // 2**16 + 2):
            parser.feed(b"x" * 2**16)


def test_an_event_of_endless_lines_is_given_up() -> None:
    parser = EventParser()
    with pytest.raises(EventTooLongError):
        for _ in range(MAX_EVENT_BYTES // 2**16 + 2):
            parser.feed(b"data: " + b"x" * 2**16 + b"\n")
