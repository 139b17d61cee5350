"""Which text to put first for the prefix cache, and what that gains: counted against a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import ConfigError
from headrace.lab.diagnose.prompts import PromptAdvice, advise, cached, estimate, pieces

_RULES = (
    "You are the assistant of a mill in the north of the country. Answer in one short sentence.\n"
    "The wheel runs from six to six, the stones are dressed on Fridays, nobody enters the pit alone.\n"
)


def log(folder: Path, systems: list[str]) -> Path:
    path = folder / "log.jsonl"
    lines = [
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Question {n}?"}]}
        for n, system in enumerate(systems)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def template(folder: Path, text: str, name: str = "prompt.txt") -> PromptAdvice:
    path = folder / name
    path.write_text(text)
    return advise(path, estimate())


def test_a_date_in_front_costs_all_that_follows(tmp_path: Path) -> None:
    days = [f"Today is the {n}th of June. {_RULES}" for n in range(10, 16)]
    advice = advise(log(tmp_path, days), estimate())
    assert advice.requests == 6 and advice.counted == "estimate"
    assert advice.cached_now == 0
    assert advice.cached_after == 48 * 5 / 6  # three blocks in all requests but the first
    assert [(part.stable, part.role) for part in advice.parts] == [
        (True, "system"),
        (False, "system, into the user's"),
        (False, "user"),
    ]
    assert advice.parts[0].share == 1.0 and advice.parts[0].text.startswith("You are the assistant")


def test_a_good_order_has_nothing_to_gain(tmp_path: Path) -> None:
    advice = advise(log(tmp_path, [_RULES] * 4), estimate())
    assert advice.gain == 0 and advice.cached_now == 36
    done = CliRunner().invoke(app, ["diagnose", "--prompts", str(log(tmp_path, [_RULES] * 4))])
    assert done.exit_code == 0 and "good as it is" in done.stdout and "estimated" in done.stdout


def test_the_models_own_tokenizer_counts(tmp_path: Path, smollm2_path: Path) -> None:
    path = log(tmp_path, [f"Today is the {n}th of June. {_RULES}" for n in range(10, 16)])
    done = CliRunner().invoke(
        app, ["diagnose", "--prompts", str(path), "--tokenizer", "smollm2-135m", "--json"]
    )
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert found["diagnosis"] is None
    prompts = found["prompts"]
    assert prompts["counted"] == "tokenizer"
    assert prompts["cached_after"] >= prompts["cached_now"] + 32


def test_later_turns_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    turns = [
        {"role": "user", "content": _RULES},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 2)
    advice = advise(path, estimate())
    assert all(part.role == "user" for part in advice.parts)
    assert advice.gain == 0  # they are equal, to their ends


@pytest.mark.parametrize("name", ["prompt.txt", "prompt.jinja"])
def test_a_templates_lines_with_fields_go_last(tmp_path: Path, name: str) -> None:
    field = ("{{ today }}", "{{ question | trim }}") if name.endswith("jinja") else ("{today}", "{question}")
    advice = template(tmp_path, f"It is {field[0]}.\n{_RULES}Question: {field[1]}\n", name)
    assert (advice.cached_now, advice.cached_after) == (0, 32)
    assert [part.stable for part in advice.parts] == [True, False, False]
    assert "{today}" in advice.parts[1].text and "Question: {question}" in advice.parts[2].text


def test_blocks_of_a_jinja_template_are_fields(tmp_path: Path) -> None:
    advice = template(tmp_path, "{% for d in documents %}{{ d }}\n{% endfor %}\n" + _RULES, "x.j2")
    assert advice.cached_now == 0 and advice.gain >= 32


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jinja", "one\n{{ broken", "a.jinja:2"),
        ("a.txt", "a {brace is open", "a.txt"),
        ("a.txt", "   \n", "empty"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "a.jsonl:2"),
        ("a.jsonl", '{"prompt": "a"}\n{oops\n', "a.jsonl:2"),
        ("a.jsonl", "", "empty"),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        template(tmp_path, text, name)


def test_a_replay_counts_whole_blocks_of_the_beginning() -> None:
    a, b = list(range(40)), [*range(20), *range(60, 80)]
    assert cached([a]) == 0
    assert cached([a, b]) == 16
    assert cached([a, a]) == 32
    assert cached([a[:32], a[:32]]) == 16  # its last token is computed in any case


def test_pieces_lose_nothing() -> None:
    text = "One. Two!  Three?\n\nFour 3.5 five\n six"
    assert "".join(pieces(text)) == text
    assert pieces("One. Two.\nThree") == ["One. ", "Two.\n", "Three"]
