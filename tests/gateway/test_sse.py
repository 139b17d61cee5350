"""What of an upstream's stream reaches a client, wherever the network cuts it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.resume import Continuation, Progress
from headrace.gateway.sse import EventFilter


def chunk(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
CHUNKS = [chunk("é\n\n😀 data: "), chunk('"usage": null'), chunk("", "stop"), {"choices": [], "usage": USAGE}]


def stream(chunks: list[dict[str, Any]], newline: bytes = b"\n", extra: bytes = b"") -> bytes:
    lines = [b"data: " + json.dumps(one, ensure_ascii=False).encode() for one in chunks]
    return b"".join(extra + line + newline * 2 for line in [*lines, b"data: [DONE]"])


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.sampled_from([b"", b": ping\n\n", b"id: 1\n"]))
def test_cuts_make_no_difference(data: st.DataObject, newline: bytes, extra: bytes) -> None:
    sent = stream(CHUNKS, newline, extra.replace(b"\n", newline))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    for wants_usage in (True, False):
        made = EventFilter(wants_usage=wants_usage, records=True)
        ends = zip([0, *cuts], [*cuts, len(sent)], strict=True)
        out = b"".join(made.feed(sent[begin:end]) for begin, end in ends) + made.feed(b"\n\n")
        assert out == stream(CHUNKS if wants_usage else CHUNKS[:-1]).removesuffix(b"data: [DONE]\n\n")
        assert made.done
        assert made.complete
        assert made.usage is not None
        assert (made.usage.prompt, made.usage.completion, made.usage.cached) == (5, 2, 4)
        assert made.record == stream(CHUNKS)


def test_usage_null_in_every_chunk_is_taken_out_as_well() -> None:
    made = EventFilter(wants_usage=False)
    out = made.feed(stream([chunk("a", usage=None), chunk("", "stop", usage=USAGE)]))
    assert b"usage" not in out
    assert made.usage is not None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_survived(data: bytes) -> None:
    made = EventFilter(wants_usage=False)
    made.feed(data + b"\n\n")
    assert not made.complete


@pytest.mark.parametrize("usage", [{"prompt_tokens": -1}, {"prompt_tokens": "9"}, 7, {"prompt_tokens": True}])
def test_impossible_usage_is_not_believed(usage: object) -> None:
    made = EventFilter(wants_usage=True)
    made.feed(stream([chunk("a", "stop", usage=usage)]))
    assert made.usage is None


def test_an_event_without_an_end_is_broken() -> None:
    made = EventFilter(wants_usage=True)
    while made.error is None:
        assert made.feed(b"a" * 2**20) == b""
    assert "longer than" in made.error


def test_what_came_before_the_break_is_not_lost() -> None:
    made = EventFilter(wants_usage=True)
    good = stream([chunk("a")]).removesuffix(b"data: [DONE]\n\n")
    assert made.feed(good + b"nonsense\n\n" + good) == good
    assert made.error is not None


def test_a_choice_left_open_is_not_complete() -> None:
    made = EventFilter(wants_usage=True)
    second = {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]}
    made.feed(stream([chunk("a"), second, chunk("", "stop")]))
    assert made.done
    assert not made.complete


def answer(name: str, words: list[str], *, begins: bool, first_id: int, told: int = 0) -> bytes:
    """A stream of ours, whose tokens count up; or its rest behind ``told`` tokens."""
    head = {"id": name, "model": name, "system_fingerprint": "f"}
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    said = [chunk(word) for word in words]
    for at, one in enumerate(said):
        one["choices"][0]["token_ids"] = [first_id + at]
    usage = {
        "prompt_tokens": 5 + told,
        "completion_tokens": len(words),
        "total_tokens": 5 + told + len(words),
    }
    rest = [chunk("", "stop"), {"choices": [], "usage": usage}]
    return stream([head | one for one in ([role] if begins else []) + said + rest])


@settings(max_examples=200, deadline=None)
@given(
    st.data(),
    st.lists(st.sampled_from(["a", " é", "\n\n", "data: ", '"'])),
    st.sampled_from(["exact", "text"]),
)
def test_wherever_a_stream_is_cut_its_rest_fits(data: st.DataObject, words: list[str], how: Any) -> None:
    """What was told and what another upstream adds are one stream: every word once, one role, one end."""
    progress = Progress({})
    made = EventFilter(wants_usage=True, progress=progress)
    whole = answer("first", words, begins=True, first_id=0)
    end = whole.index(b'"finish_reason": "stop"')
    out, places = b"", sorted(data.draw(st.lists(st.integers(0, end), min_size=1, max_size=4)))
    for begin, stop in zip([0, *places], places, strict=False):
        out += made.feed(whole[begin:stop])
    assert not made.any_ended
    said = len(progress.texts)
    assert "".join(progress.texts) == "".join(words[:said])
    assert progress.token_ids == list(range(said))
    told = said if how == "text" else 0
    made.go_on(Continuation(how, b"", told), None)
    rest = answer(
        "second", words[said:], begins=data.draw(st.booleans()) or not said, first_id=said, told=told
    )
    out += made.feed(rest)
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in out.split(b"\n\n") if block]
    assert made.done
    assert made.complete
    assert len({one["id"] for one in chunks}) == 1
    choices = [one for each in chunks for one in each["choices"]]
    assert sum("role" in one["delta"] for one in choices) == (1 if progress.role_told else 0)
    assert "".join(one["delta"].get("content", "") for one in choices) == "".join(words)
    assert [one["finish_reason"] for one in choices if one.get("finish_reason")] == ["stop"]
    if how == "text":
        assert made.usage is not None
        assert (made.usage.prompt, made.usage.completion) == (5, len(words))
        assert chunks[-1]["usage"]["total_tokens"] == 5 + len(words)
