"""Chat templates: what models bring, what users write, and what a hostile file could try."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.errors import InvalidRequestError, ModelFormatError
from headrace.frontend.chat_template import ChatTemplate
from headrace.frontend.frontend import Frontend
from headrace.frontend.tokenizer import Tokenizer
from tests.frontend.byte_model import EOS, TURN, byte_backend

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **variables)


def test_variables_and_functions_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ tools is none }} {{ add_generation_prompt }}") == "True True"
    assert render("{{ thinking }}{{ self_ }}", thinking=False, self_=1, **{"self": 2}) == "False1"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nx\n{% endif %}\n") == "x\n"


def test_loops_know_their_place() -> None:
    """Loops are counted through a filter, which must not cost them loop.last and its kin."""
    source = "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ '!' if loop.last }} {% endfor %}"
    assert render(source, USER * 3) == "0/3 1/3 2/3! "
    assert render("{% for k, v in messages[0].items() %}{{ k }}{% endfor %}") == "rolecontent"
    assert (
        render("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}", USER * 2) == "22"
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"function": {"name": "f", "arguments": json.dumps({"x": 1})}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render(source, [message]) == "2"
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's message is left alone"


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        ([], "messages", "empty"),
        ("hello", "messages", "list"),
        ({"role": "user"}, "messages", "list"),
        (["hello"], "messages[0]", "object"),
        ([{"content": "x"}], "messages[0].role", "role"),
        ([{"role": 3, "content": "x"}], "messages[0].role", "role"),
        ([*USER, {"role": "user"}], "messages[1].content", "missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content", "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "string text"),
        ([{"role": "a", "tool_calls": [{}]}], "messages[0].tool_calls", "function"),
        (
            [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls",
            "not valid JSON",
        ),
    ],
)
def test_malformed_messages(messages: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        render("{{ messages }}", messages)
    assert caught.value.param == field


def test_a_refusal_in_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('Roles must alternate') }}")
    assert caught.value.message == "Roles must alternate"


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ModelFormatError, match="jinja"):
        ChatTemplate("{% if %}")


# The constructs that the templates of the common families use, in a template of our own.
EVERYTHING = """{%- set state = namespace(last=-1, turns=0) %}
{%- macro shown(tool, indent) -%}
    {{- tool.function.name }}: {{ tool | tojson(indent=indent) }}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = 'none', messages %}
{%- endif %}
{{- bos_token ~ '<sys>' + system + '</sys>\\n' }}
{%- if tools is not none and tools | length > 0 %}
    {% for tool in tools %}
{{ shown(tool, 4) }}
    {% endfor %}
{%- endif %}
{%- for message in rest[::-1] if message.role == 'user' %}
    {%- if state.last < 0 %}{% set state.last = (rest | length - 1) - loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.content is string and message.content.startswith('#') %}{% continue %}{% endif %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {{- '<%s>' % message.role + content.replace('a', 'b') | upper + (eos_token if loop.last else '') }}
    {%- for call in message.tool_calls or [] %}
        {%- for key, value in call.function.arguments.items() | sort %}
{{ key }}={{ value if value is string else value | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
    {%- endfor %}
    {%- set state.turns = state.turns + 1 %}
{%- endfor %}
{{ state.turns }}/{{ rest | selectattr('role', 'equalto', 'user') | list | length }} {{ state.last }}
{%- if add_generation_prompt %}
<assistant>{% if thinking is defined and not thinking %}no{% endif %}
{% endif %}
"""


@pytest.mark.parametrize("tools", [None, [{"function": {"name": "f", "x": ["é", 1, None]}}]])
def test_rendered_as_transformers_does(tools: Any) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    call = {"function": {"name": "f", "arguments": {"b": "text", "a": [1, {"c": "é"}]}}}
    messages = [
        {"role": "system", "content": "  be kind "},
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "<think>hm</think>\n\nan answer", "tool_calls": [call]},
        {"role": "user", "content": "# a comment"},
        {"role": "assistant", "content": "last"},
    ]
    theirs = utils._compile_jinja_template(EVERYTHING)
    for conversation in (messages, messages[1:], messages[:2]):
        for variables in ({}, {"thinking": False}):
            values = {"tools": tools, "add_generation_prompt": True, **variables}
            assert render(EVERYTHING, conversation, **values) == theirs.render(
                messages=conversation, bos_token="<s>", eos_token="</s>", **values
            )


DOUBLING = (
    "{{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}}"
    "{{% for i in range(60) %}}{{% set ns.x = ns.x {} ns.x %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in [1] * 3 recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ range(1000000000) | list }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a\t'.expandtabs(1000000000) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ range(90000) | join('b' * 10000) }}",
        "{{ ('b' * 10000).join(['a'] * 10000) }}",
        "{% for i in range(90000) %}{{ 'a' * 10000 }}{% endfor %}",
        DOUBLING.format("~"),
        DOUBLING.format("+"),
    ],
)
def test_hostile_templates_end_soon_with_a_clear_error(source: str) -> None:
    began = time.process_time()
    with pytest.raises((InvalidRequestError, ModelFormatError), match="chat template"):
        render(source)
    assert time.process_time() - began < 5.0


def test_a_budget_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok")
    assert [template.render(USER) for _ in range(4)] == ["ok"] * 4


def test_a_long_conversation_is_within_budget() -> None:
    messages = [{"role": "user", "content": "word " * 50}] * 2000
    assert (
        render("{% for m in messages %}{{ m.content | trim }}{% endfor %}", messages).count("word") == 100_000
    )


def test_encode_chat_parses_control_tokens(frontend: Frontend) -> None:
    ids = frontend.encode_chat([{"role": "u", "content": "x"}])
    text = frontend.tokenizer.encode
    assert ids == [TURN, *text("u:x"), EOS, TURN, *text("assistant:")]


def test_a_base_model_refuses_chat_and_says_what_to_do(make_frontend: Any) -> None:
    base = make_frontend(tokenizer=Tokenizer(byte_backend()))
    with pytest.raises(InvalidRequestError, match=r"no chat template.*completions"):
        base.encode_chat(USER)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "does it"}}


def test_a_template_without_tools_has_them_told_in_words() -> None:
    text = ChatTemplate(PLAIN).render([{"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("<system>")
    assert '{"name": "f", "description": "does it"}' in text
    assert text.endswith("<user>hi")
    text = ChatTemplate(PLAIN).render(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}], tools=[TOOL]
    )
    assert text.startswith("<system>Be kind.\n\n")
    assert text.count("<system>") == 1


def test_a_template_without_calls_has_them_written_out() -> None:
    text = ChatTemplate(PLAIN).render(
        [
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ]
    )
    assert text == (
        '<assistant>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
        "<user><tool_response>\n42\n</tool_response>"
    )


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls | length }}{% endfor %}"
    )
    text = ChatTemplate(template).render([{"role": "assistant", "tool_calls": [CALL]}], tools=[TOOL])
    assert json.loads(text.removesuffix("assistant1")) == [TOOL]
