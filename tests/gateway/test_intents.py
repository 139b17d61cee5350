"""The classifier of intents: how good the shipped one is, and training, measuring and explaining one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.gateway.intents.classifier import Classifier, read_classifier
from headrace.gateway.intents.evaluation import judge_all, report
from headrace.gateway.intents.examples import INTENTS, Example, folds, read_examples, shipped, split
from headrace.gateway.intents.features import embedded, features
from headrace.gateway.intents.training import train
from tests.e2e.running import called

ROOT = Path(__file__).parents[2]


def test_the_shipped_classifier_on_held_out_examples() -> None:
    """What docs/gateway-routing.md says, less what another ISA path may change."""
    ended = called("gateway", "route", "eval", "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["with_embeddings"]["examples"] >= 120
    assert told["with_embeddings"]["accuracy"] >= 0.82
    assert told["with_embeddings"]["ece"] <= 0.1
    assert told["features_only"]["accuracy"] >= 0.77
    assert told["features_only"]["ece"] <= 0.12
    assert told["with_embeddings"]["difficulty_mae"] < told["with_embeddings"]["difficulty_baseline"]
    assert {score["intent"] for score in told["with_embeddings"]["intents"]} == {*INTENTS}


def test_held_out_examples_share_nothing_with_those_trained_on() -> None:
    trained, held_out = read_examples(shipped("training.jsonl")), read_examples(shipped("held-out.jsonl"))
    assert len(trained) >= 800
    assert len(held_out) >= 120
    counts = [sum(example.intent == intent for example in trained) for intent in INTENTS]
    assert min(counts) > 0.8 * max(counts)
    assert not {example.text.lower() for example in trained} & {example.text.lower() for example in held_out}


def test_the_examples_come_from_their_sources(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "routing" / "examples.py"
    subprocess.run([sys.executable, str(script), "--folder", str(tmp_path)], check=True)
    for name in ("training.jsonl", "held-out.jsonl"):
        assert (tmp_path / name).read_bytes() == shipped(name).read_bytes()


def few(count: int) -> list[Example]:
    """So many shipped examples of each of three intents, of different groups."""
    found: list[Example] = []
    for intent in ("chat", "code", "maths"):
        seen: set[str] = set()
        for example in read_examples(shipped("training.jsonl")):
            if example.intent == intent and example.group not in seen and len(seen) < count:
                seen.add(example.group)
                found.append(example)
    return found


def write(path: Path, examples: list[Example]) -> Path:
    rows = [{"text": one.text, "intent": one.intent, "difficulty": one.difficulty} for one in examples]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_classifier_is_trained_measured_and_asked(tmp_path: Path) -> None:
    labelled, file = write(tmp_path / "labelled.jsonl", few(30)), tmp_path / "intents.json"
    trained = called("gateway", "route", "train", str(labelled), "--output", str(file))
    assert trained.returncode == 0, trained.stderr
    assert "Trained on 72 examples, measured on 18" in trained.stdout
    assert all(word in trained.stdout for word in ("accuracy", "ECE", "maths", "difficulty MAE"))
    again = tmp_path / "again.json"
    told = called("gateway", "route", "train", str(labelled), "--output", str(again), "--json")
    assert again.read_bytes() == file.read_bytes(), "the same examples make the same classifier"
    assert json.loads(told.stdout)["with_embeddings"]["accuracy"] > 0.6

    measured = called("gateway", "route", "eval", str(labelled), "--classifier", str(file), "--json")
    assert json.loads(measured.stdout)["with_embeddings"]["accuracy"] > 0.9, "it has learnt from these"
    explained = called(
        "gateway", "route", "explain", "x^2 = 2, solve for x", "--classifier", str(file), "--json"
    )
    read = json.loads(explained.stdout)
    assert read["intent"] == "maths"
    assert sum(read["probabilities"].values()) == pytest.approx(1)
    assert read["seen"] == "embedding"
    assert "embedding" in read["shares"]
    unknown = called("gateway", "route", "eval", "--classifier", str(file))
    assert unknown.returncode == 1
    assert "does not know the intent" in unknown.stderr


def test_explain_says_what_routes_choose(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "upstreams: {one: {url: 'http://127.0.0.1:1/v1', models: {s: {}, l: {price: {output: 1}}}}}\n"
        "routes: {auto: {candidates: {s: {quality: 0.5}, l: {quality: 0.9}}}}\n"
    )
    arguments = ("gateway", "route", "explain", "--features-only", "--config", str(path))
    chat = called(*arguments, "Hi there, how are you feeling today?")
    assert "chat, confidence" in chat.stdout, chat.stderr
    assert "route auto: s (quality)" in chat.stdout
    code = called(*arguments, "Write a Python function that parses JSON and add unit tests.")
    assert "route auto: l (quality)" in code.stdout


def test_examples_can_be_written_out_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    assert called("gateway", "route", "examples", str(path)).returncode == 0
    assert path.read_bytes() == shipped("training.jsonl").read_bytes()
    again = called("gateway", "route", "examples", str(path))
    assert again.returncode == 1
    assert "exists already" in again.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a", "intent": "chat"', ":3: this is not JSON"),
        ('["a"]', ":3: an object is needed"),
        ('{"text": "", "intent": "chat"}', ":3: text: a string"),
        ('{"text": "a", "intent": 3}', ":3: intent: a lower-case word"),
        ('{"text": "a", "intent": "Chat!"}', ":3: intent: a lower-case word"),
        ('{"text": "a", "intent": "chat", "difficulty": 2}', ":3: difficulty: a number from 0 to 1"),
        ('{"text": "a", "intent": "chat", "difficulty": true}', ":3: difficulty: a number from 0 to 1"),
        ('{"text": "a", "intent": "chat", "label": "b"}', ":3: 'label' is no field"),
        ('{"text": "a", "intent": "chat", "group": 7}', ":3: group: a short string"),
        ("\xff", ":3: this is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_bytes(b'{"text": "a", "intent": "chat"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError) as error:
        read_examples(path)
    assert f"labelled.jsonl{said}" in error.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no examples"),
        (
            '{"text": "a", "intent": "chat"}\n{"text": "b", "intent": "chat"}\n',
            "every intent needs several groups",
        ),
    ],
)
def test_too_few_examples_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text(text)
    ended = called("gateway", "route", "train", str(path), "--output", str(tmp_path / "out.json"))
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_groups_are_never_parted() -> None:
    examples = [
        Example(f"{group} {n}", f"intent{group % 3}", None, f"g{group}")
        for group in range(30)
        for n in range(5)
    ]
    kept, out = split(examples, 0.2, seed=1)
    assert len(kept) + len(out) == len(examples)
    assert 0.1 < len(out) / len(examples) < 0.3
    assert not {one.group for one in kept} & {one.group for one in out}
    assert {one.text for one in split(examples[::-1], 0.2, seed=1)[1]} == {one.text for one in out}
    numbers = folds(examples, 5, seed=1)
    assert all(numbers[at] == numbers[at - at % 5] for at in range(len(examples)))
    assert set(numbers) == {0, 1, 2, 3, 4}


def test_temperature_keeps_confidence_honest() -> None:
    """Labels that are half noise: a classifier that is right half of the time may not be sure."""
    generator = np.random.default_rng(3)
    vectors = generator.normal(size=(600, 16)).astype(np.float32)
    honest = vectors[:, 0] > 0
    label = np.where(generator.random(600) < 0.5, honest, generator.random(600) < 0.5)
    examples = [Example(f"text {at}", "yes" if label[at] else "no") for at in range(600)]
    made = train(examples[:400], vectors[:400], "random")
    measured = report(examples[400:], judge_all(Classifier(made), examples[400:], vectors[400:]))
    assert 0.6 < measured.accuracy < 0.9
    assert abs(measured.confidence - measured.accuracy) < 0.1
    assert measured.difficulty_mae is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "pickle"}, "format"),
        ({"inputs": ["length"]}, "train it again"),
        ({"intents": ["chat", "chat"]}, "different lower-case words"),
        ({"dimensions": 7}, "arrays must have"),
        ({"dimensions": 10**9}, "dimensions"),
        ({"features_only": {}}, "features_only.mean"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_file_that_is_no_classifier_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "intents.json"
    path.write_text(json.dumps(json.loads(shipped("intents.json").read_bytes()) | change))
    with pytest.raises(ConfigError) as error:
        read_classifier(path)
    assert said in error.value.message


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "intents.json"
    read = json.loads(shipped("intents.json").read_bytes())
    read["features_only"]["bias"][0] = float("nan")
    path.write_text(json.dumps(read))
    with pytest.raises(ConfigError):
        read_classifier(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "?",
        "\n\n\n",
        "\ud800",
        "a" * 100_000,
        "\n" * 5000 + "b",
        '"' * 3000,
        "x, " * 20_000,
        "({[" * 9000,
    ],
)
def test_any_text_has_finite_features(text: str) -> None:
    assert np.isfinite(features(text)).all()
    assert len(embedded(text)) < 1200
    read_classifier().judge(text, None)


def test_what_is_embedded_is_what_is_wanted() -> None:
    document = "The tide was out and the boats lay on their sides. " * 30
    short = embedded(f"Which verbs occur here?\n\n{document}\n\nAnswer as a list.")
    assert short.startswith("Which verbs occur here?\n")
    assert short.endswith("\nAnswer as a list.")
    assert len(short) < 300
    quoted = embedded(f'Translate "{document[:90]}" please')
    assert quoted.startswith('Translate "The tide was out')
    assert quoted.endswith('…" please')
