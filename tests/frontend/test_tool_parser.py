"""Tool calls read back from text: in every format, in whatever pieces the text comes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.frontend.tools import FORMATS, ToolParser, tool_format

NAMES = frozenset({"f", "g", "get_weather"})
Read = tuple[str, list[tuple[str, str]]]


def read(form: str, pieces: list[str], *, parallel: bool = True) -> Read:
    """Content, and name and arguments of each call, with the rules of OpenAI's deltas checked."""
    parser = ToolParser(FORMATS[form], NAMES, parallel=parallel)
    content, calls = "", []
    ids = set()
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.index == len(calls):
                assert delta.id and delta.name, "the first delta of a call names it"
                ids.add(delta.id)
                calls.append([delta.name, ""])
            else:
                assert delta.id is None and delta.name is None
                assert delta.index == len(calls) - 1, "a call goes on after the next began"
            calls[delta.index][1] += delta.arguments
    assert len(ids) == len(calls) == parser.num_calls
    return content, [(name, arguments) for name, arguments in calls]


CASES: list[tuple[str, str, Read]] = [
    ("hermes", "", ("", [])),
    ("hermes", " Just text.\n", (" Just text.\n", [])),
    ("hermes", "a < b, <tool_cal", ("a < b, <tool_cal", [])),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    (
        "hermes",
        'Sure.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": [{"y": "}"}]}, "name": "g"}\n</tool_call>',
        ("Sure.", [("f", "{}"), ("g", '{"x": [{"y": "}"}]}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call> \\" {"}}</tool_call> Done.',
        (" Done.", [("f", '{"s": "</tool_call> \\" {"}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', ("", [("f", '{"a": ')])),
    ("hermes", "<tool_call>what?</tool_call>", ("<tool_call>what?</tool_call>", [])),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": "no"}</tool_call>', ('<tool_call>{"name": "no"}</tool_call>', [])),
    ("hermes", '<tool_call>{"x" 1}</tool_call>', ('<tool_call>{"x" 1}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": "f"<tool_call>', ("", [("f", "")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ]', ("]", [("f", '{"a": ')])),
    (
        "hermes",
        '<tool_call>{"name": "no", "a": "<tool_call>"}',
        ('<tool_call>{"name": "no", "a": "<tool_call>"}', []),
    ),
    ("hermes", '<tool_call>{"name": "g', ('<tool_call>{"name": "g', [])),
    ("hermes", "<tool_call>\n", ("<tool_call>\n", [])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    (
        "mistral",
        'Well [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1, 2]}}]',
        ("Well", [("f", "{}"), ("g", '{"b": [1, 2]}')]),
    ),
    ("mistral", "An [array] of [TOOL", ("An [array] of [TOOL", [])),
    ("llama3_json", '{"name": "f", "parameters": {"a": "b"}}', ("", [("f", '{"a": "b"}')])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"c": 3}}',
        ("", [("f", "{}"), ("g", '{"c": 3}')]),
    ),
    ("llama3_json", 'Look: {"name": "f"}', ('Look: {"name": "f"}', [])),
    ("llama3_json", '{"name": "Alice", "age": 3}', ('{"name": "Alice", "age": 3}', [])),
    ("llama3_json", '\n{"answer": 42}.', ('\n{"answer": 42}.', [])),
    ("llama3_json", "<|py", ("<|py", [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_a_text_and_its_calls(form: str, text: str, expected: Read) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


@given(st.data())
def test_any_split_gives_the_same(data: st.DataObject) -> None:
    """A mark, a name or an escape that was cut in two was read as something else."""
    form, text, expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == expected


_PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f"', ', "arguments": '),
    *('"parameters"', "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "f", "1", "null", "; ", "<tool"),
)
_fragments = st.lists(st.sampled_from(_PIECES), max_size=14).map("".join)


@given(st.sampled_from(sorted(FORMATS)), _fragments, st.booleans())
def test_nonsense_is_read_the_same_however_it_is_cut(form: str, text: str, parallel: bool) -> None:
    whole = read(form, [text], parallel=parallel)
    assert read(form, list(text), parallel=parallel) == whole
    cut = len(text) // 2
    assert read(form, [text[:cut], text[cut:]], parallel=parallel) == whole
    if not whole[1]:
        assert whole[0] == text, "what is no call is content, to the letter"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), _json)), min_size=1
    ),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_models_write_is_read_back(
    form: str, calls: list[tuple[str, dict[str, object]]], ascii_only: bool, size: int
) -> None:
    style = FORMATS[form]
    objects = [
        json.dumps({"name": name, style.arguments_key: arguments}, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    if style.one_block:
        text = style.begin + style.opening + style.separator.join(objects) + style.closing
    else:
        text = style.separator.join(
            style.begin + style.opening + each + style.closing + style.end for each in objects
        )
    content, found = read(form, [text[i : i + size] for i in range(0, len(text), size)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    _, first = read(form, [text], parallel=False)
    assert first == found[:1]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call></tool_call>{% endif %}", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        (
            '<|start_header_id|> Environment: ipython {"name": f, "parameters": x} <|python_tag|>',
            "llama3_json",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_template_says_which_format(template: str | None, name: str) -> None:
    assert tool_format(template).name == name
    assert tool_format(template, "mistral").name == "mistral"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, mistral"):
        tool_format(None, "wibble")


def test_mistral_ids_are_what_its_templates_insist_on() -> None:
    parsed = ToolParser(FORMATS["mistral"], NAMES).push('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    call_id = parsed.calls[0].id or ""
    assert len(call_id) == 9 and call_id.isalnum()
