"""The gate from outside: what an honest 8-bit model keeps, what a damaged one breaks, answers' lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.lab.evaluate.gate import Gate
from headrace.lab.evaluate.results import Context, Item, ModelContext, Report, SuiteRecord, items_result
from tests.e2e.running import run
from tests.lab.endpoint_server import completion, server
from tests.lab.small_models import TEXT, damage, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    make_model(folder / "good", steps=80)
    for how in ("scaled", "flipped"):
        damage(folder / "good", folder / how, how)
    (folder / "text.txt").write_text(TEXT)
    return folder


def evaluate(folder: Path, model: str, *more: str) -> tuple[int, str]:
    arguments = [
        "-s",
        "perplexity",
        "--text",
        str(folder / "text.txt"),
        "--threads",
        "1",
        "--gate",
        "default",
    ]
    done = run("eval", str(folder / model), "--against", str(folder / "good"), *arguments, *more)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_an_honest_8_bit_model_passes(folder: Path) -> None:
    code, printed = evaluate(folder, "good", "--quantization", "int8")
    assert (code, printed.splitlines()[-1]) == (0, "gate: passed"), printed


@pytest.mark.parametrize("how", ["scaled", "flipped"])
def test_a_damaged_model_is_refused_by_name(folder: Path, how: str) -> None:
    code, printed = evaluate(folder, how)
    assert (code, printed.splitlines()[-1]) == (1, "gate: refused, by perplexity"), printed
    assert "gate: perplexity: kl_mean is" in printed


@pytest.mark.parametrize(
    ("tokens", "code", "said"),
    [(11, 0, "passed"), (12, 1, "own: answers are 20% longer, more than 10%"), (8, 1, "20% shorter")],
)
def test_answers_may_not_grow_or_shrink_too_far(tmp_path: Path, tokens: int, code: int, said: str) -> None:
    def respond(body: dict[str, Any], key: str | None) -> tuple[int, bytes]:
        count = tokens if body["model"] == "new" else 10
        return 200, completion("word " * count, usage={"completion_tokens": count})

    (tmp_path / "own.yaml").write_text(
        "name: own\ncases:\n" + "  - {prompt: Go, checks: [{contains: word}]}\n" * 4
    )
    (tmp_path / "gate.yaml").write_text("suites: {own: {length_drift: 0.1}}")
    with server(respond) as url:
        done = run(
            *("eval", "new", "--against", "old", "--endpoint", url, "-s", str(tmp_path / "own.yaml")),
            *("--gate", str(tmp_path / "gate.yaml"), "-o", str(tmp_path / "eval.json")),
        )
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    drift = json.loads((tmp_path / "eval.json").read_text())["suites"]["own"]["result"]["output_tokens_drift"]
    assert drift["difference"]["value"] == drift["low"] == drift["high"] == tokens - 10


def report(items: list[Item], reference: list[Item] | None) -> Report:
    model = ModelContext(
        reference="m", fingerprint=None, tokenizer=None, quantization=None, backend="cpu", device="cpu"
    )
    context = Context(
        headrace="0", python="3", numpy="2", machine="m", isa=None, cpus=1, endpoint=None, model=model,
        against=None, limit=None, seed=0,
    )  # fmt: skip
    record = SuiteRecord(settings={}, seconds=0, result=items_result("generation", items, reference, seed=0))
    return Report(started="now", context=context, suites={"own": record})


def items(scores: list[float | None], tokens: int | None = None) -> list[Item]:
    return [
        Item(id=f"q{at}", scores={} if score is None else {"pass": score}, tokens=tokens)
        for at, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("limits", "ours", "theirs", "failures"),
    [
        ({"drop": 0.5}, items([1, 0]), items([1, 1]), []),
        ({"drop": 0.4}, items([1, 0]), items([1, 1]), ["own: pass fell by 0.500, more than 0.4"]),
        ({"lost": 0}, items([0.5, 0.5]), items([1, 1]), ["own: pass is not right or wrong for each answer"]),
        ({"at_least": 0.5}, items([1, None]), None, ["own: 1 cases were not judged"]),
        ({"at_least": 0.5}, items([None]), None, ["own: 1 cases were not judged", "own: has no score"]),
        ({"drop": 0.5}, items([1]), None, ["own: pass was not compared with a reference"]),
        ({"length_drift": 0.5}, items([1]), items([1]), ["own: the answers' lengths were not compared"]),
        ({"length_drift": 0.5}, items([1], 2), items([1], 0), ["own: answers are 100% longer"]),
        ({"at_least": 0, "metric": "acc"}, items([1]), None, ["own: has no metric 'acc', only pass"]),
    ],
)
def test_every_limit_that_is_broken_or_was_not_measured_is_a_failure(
    limits: dict[str, Any], ours: list[Item], theirs: list[Item] | None, failures: list[str]
) -> None:
    gate = Gate.model_validate({"suites": {"own": limits}})
    found = gate.failures(report(ours, theirs))
    assert len(found) == len(failures)
    assert all(got.startswith(expected) for got, expected in zip(found, failures, strict=True)), found
