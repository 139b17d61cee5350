"""Checks of answers, and the YAML files that hold them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.lab.evaluate.checks import Check, last_number, marked_number
from headrace.lab.evaluate.choices import hellaswag
from headrace.lab.evaluate.gate import read_gate
from headrace.lab.evaluate.own_suite import read_suite
from headrace.lab.evaluate.questions import arithmetic, json_objects, needle


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        ({"exact": "Paris"}, " Paris\n", "paris"),
        ({"exact": "Paris", "ignore_case": True}, "PARIS", "Paris."),
        ({"contains": "wheel"}, "the wheel turns", "the Wheel turns"),
        ({"regex": r"^\d+ km$"}, "12 km", "about 12 km"),
        ({"number": 18}, "so 6 * 3 = $18.", "18 of 20"),
        ({"number": 1234.5}, "it is 1,234.50", "1,234.6"),
        ({"number": 0.3, "tolerance": 0.1}, "about 1/4", "about 1/8"),
        ({"number": -4}, "the sum is -4", "the sum is 4"),
        ({"number": 4}, "7-4", "no number"),
        ({"json-schema": {"type": "object"}}, '```json\n{"a": 1}\n```', 'Here: {"a": 1}'),
        ({"json-schema": {"required": ["a"]}}, '{"a": NaN}'.replace("NaN", "1"), '{"a": NaN}'),
        ({"json-schema": {"type": "array"}}, "[1]", "[" * 100_000),
        ({"contains": "a", "regex": "b$"}, "a b", "b a"),
    ],
)
def test_a_check_tells_right_from_wrong(check: dict[str, Any], right: str, wrong: str) -> None:
    parsed = Check.model_validate(check)
    assert parsed.passes(right)
    assert not parsed.passes(wrong)


def test_numbers_of_gsm8k() -> None:
    answer = "3 and 4 make 7.\n#### 1,007\nThanks 2 you"
    assert (marked_number(answer), last_number(answer)) == (Fraction(1007), Fraction(2))
    assert marked_number("the answer is 7") is None
    assert last_number("1/0") is None


@dataclass
class Reader:
    """Who counts words instead of tokens."""

    context_length: int | None

    def count_tokens(self, text: str) -> int:
        return len(text.split())


def test_generated_questions_depend_on_the_seed_alone() -> None:
    first, again, other = (needle(seed, Reader(1200)) for seed in (3, 3, 4))
    assert [q.prompt for q in first] == [q.prompt for q in again] != [q.prompt for q in other]
    assert {q.id.split("-")[0] for q in first} == {"512", "1024"}
    number = first[0].prompt.split("number is ")[1][:5]
    assert first[0].score(f"It is {number}.").scores == {"found": 1.0}
    assert first[0].score("It is 7.").scores == {"found": 0.0}
    asked = json_objects(3, Reader(None))
    assert asked[0].score("{}").scores["valid"] == 1.0
    assert asked[0].score("{}").scores["schema"] == 0.0
    with pytest.raises(ConfigError, match="640"):
        needle(0, Reader(100))


def test_arithmetic_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        arithmetic(0, Reader(None))


def test_arithmetic_knows_its_answers() -> None:
    pytest.importorskip("reasoning_gym")
    questions = arithmetic(1, Reader(None))
    assert [q.prompt for q in questions] == [q.prompt for q in arithmetic(1, Reader(None))]
    first = questions[0]  # Calculate 5 - 3 - 6.
    assert first.score("5 - 3 - 6 = -4").scores == {"right": 1.0}
    assert first.score("4").scores == {"right": 0.0}


GOOD = """\
name: capitals
max_tokens: 8
cases:
  - prompt: The capital of France?
    checks:
      - contains: Paris
  - prompt: Two and two?
    id: sum
    max_tokens: 4
    checks: [{number: 4}, {regex: "^4"}]
"""


def test_a_suite_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(GOOD)
    suite = read_suite(path)
    assert suite.name == "capitals"
    assert [(q.id, q.max_tokens) for q in suite.questions] == [("capitals-1", 8), ("sum", 4)]
    assert suite.questions[1].score("4").scores == {"pass": 1.0}
    assert suite.questions[1].score("it is 4").scores == {"pass": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("contains: Paris", "contain: Paris"), r"suite.yaml:6: cases.0.checks.0.contain: Extra"),
        (('"^4"', '"(4"'), r"suite.yaml:10: cases.1.checks.1.regex: .*regular expression"),
        (("{number: 4}", "{number: four}"), r"suite.yaml:10: .*number: .*valid number"),
        (("{number: 4}", "{json-schema: {type: 3}}"), r"suite.yaml:10: .*not a JSON schema"),
        (("max_tokens: 4", "max_tokens: 0"), r"suite.yaml:9: cases.1.max_tokens"),
        (("checks:\n      - contains: Paris", "checks: []"), r"suite.yaml:5: cases.0.checks"),
        (("cases:", "cases: ["), r"is not YAML"),
        ((GOOD, ""), r"suite.yaml:1: the file"),
    ],
)
def test_a_mistake_in_a_suite_is_named_with_its_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_suite(path)


def test_a_schema_fetches_nothing() -> None:
    check = Check.model_validate({"json-schema": {"$ref": "http://127.0.0.1:9/schema.json"}})
    with pytest.raises(ConfigError, match="nothing is fetched"):
        check.passes("{}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl_mean: 0.1\nkl: 0.1", r"gate.yaml:2: kl: Extra"),
        ("same_top1: 95", r"gate.yaml:1: same_top1: .*less than or equal to 1"),
        (
            "suites:\n  hellaswag: {metric: acc}",
            r"gate.yaml:2: suites.hellaswag: .*give drop, lost, at_least or length_drift",
        ),
        ("{}", r"at least one limit"),
    ],
)
def test_a_mistake_in_a_gate_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_gate(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_gate(tmp_path / "none.yaml")


def test_a_malformed_case_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.lab.data_wheel import offer_cases

    offer_cases(tmp_path, monkeypatch, hellaswag='{"id": "a"}\n')
    with pytest.raises(ConfigError, match=r"cases.jsonl:1: activity_label: Field required"):
        hellaswag()
