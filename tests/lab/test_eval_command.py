"""``headrace eval`` from outside: scores, comparisons, the gate, files of results that are resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import LLM, SamplingParams
from headrace.cli import main
from tests.e2e.running import COMMAND
from tests.lab.data_wheel import offer_cases
from tests.lab.small_models import TEXT, make_model

GATE = "kl_mean: 0.02\nsame_top1: 0.9\nln_ppl_ratio: 0.05\nsuites:\n  hellaswag: {drop: 0.1, lost: 1}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model and a damaged copy, a text, and a gate."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "good", chat=True)
    make_model(folder / "damaged", noise=0.5)
    (folder / "text.txt").write_text(TEXT)
    (folder / "gate.yaml").write_text(GATE)
    return folder


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_cases(tmp_path, monkeypatch)


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Evaluate = Callable[..., Done]


@pytest.fixture
def evaluate(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """``headrace eval …`` in this process: whole programs take seconds to start on a busy machine."""

    def call(*arguments: str) -> Done:
        common = ["--text", str(models / "text.txt"), "--threads", "1"]
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["headrace", "eval", *common, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call


def test_an_honest_8_bit_model_passes_the_gate(models: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    good, output = str(models / "good"), tmp_path / "eval.json"
    suites = ["--suite", "perplexity,hellaswag", "--gate", str(models / "gate.yaml")]
    suites += ["-o", str(output), "--context-length", "256"]
    done = evaluate(good, "--against", good, "--quantization", "int8", *suites)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "gate: passed" in done.stdout
    for shown in ("perplexity (windows)", "KL mean", "same top-1", "hellaswag", "acc_norm"):
        assert shown in done.stdout
    report = json.loads(output.read_text())
    assert report["context"]["model"]["quantization"] == "int8"
    assert report["context"]["against"]["quantization"] is None
    text = report["suites"]["perplexity"]["result"]
    assert (text["convention"], text["context_length"]) == ("windows", 256)
    assert text["tokenizer"] == report["context"]["model"]["tokenizer"]
    assert 0 < text["divergence"]["kl"]["value"] < 0.02
    assert len(report["suites"]["hellaswag"]["result"]["items"]) == 12

    again = evaluate(good, "--against", good, "--quantization", "int8", *suites)
    assert again.returncode == 0
    assert "not run again: perplexity, hellaswag" in again.stdout
    other = evaluate(good, "--suite", "perplexity", "-o", str(output))
    assert other.returncode == 1
    assert "holds another evaluation" in other.stderr
    assert json.loads(output.read_text()) == report


def test_what_keys_and_values_in_int8_cost(models: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    good, output = str(models / "good"), tmp_path / "eval.json"
    narrow = ("--kv-cache-dtype", "int8", "--suite", "perplexity", "-o", str(output))
    done = evaluate(good, "--against", good, *narrow)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(output.read_text())
    assert report["context"]["model"]["kv_cache_dtype"] == "int8"
    assert report["context"]["against"]["kv_cache_dtype"] == "auto"
    assert 0 < report["suites"]["perplexity"]["result"]["divergence"]["kl"]["value"] < 0.005


def test_a_damaged_model_is_refused_and_what_fell_is_named(models: Path, evaluate: Evaluate) -> None:
    arguments = ["--against", str(models / "good"), "--gate", str(models / "gate.yaml")]
    done = evaluate(str(models / "damaged"), *arguments, "--suite", "perplexity,hellaswag")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "gate: perplexity: kl_mean is" in done.stdout
    assert "gate: perplexity: same_top1 is" in done.stdout
    assert "gate: perplexity: ln_ppl_ratio is" in done.stdout
    assert done.stdout.endswith("gate: refused, by perplexity\n")


def test_a_gate_needs_its_suites_and_a_reference(models: Path, evaluate: Evaluate) -> None:
    good, gate = str(models / "good"), ["--gate", str(models / "gate.yaml"), "--suite", "perplexity"]
    assert "has limits on hellaswag: add --suite" in evaluate(good, "--against", good, *gate).stderr
    assert "compares with a reference: name one with --against" in evaluate(good, *gate).stderr


def test_generation_suites_compare_answer_by_answer(models: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    suite, output = tmp_path / "own.yaml", tmp_path / "eval.json"
    suite.write_text(
        "name: own\nmax_tokens: 6\ncases:\n"
        "  - {prompt: Say something, checks: [{regex: '.'}]}\n"
        "  - {prompt: Say nothing, checks: [{exact: ''}]}\n"
    )
    good = str(models / "good")
    done = evaluate(good, "--against", good, "-s", f"{suite},json", "--limit", "2", "-o", str(output))
    assert done.returncode == 0, done.stderr
    suites: dict[str, Any] = json.loads(output.read_text())["suites"]
    own = suites["own"]["result"]
    assert own["against"]["pass"]["difference"]["value"] == 0
    drift = own["output_tokens_drift"]
    assert (drift["difference"]["value"], drift["low"], drift["high"], drift["gained"]) == (0, 0, 0, None)
    assert [item["answer"] for item in own["items"]] == [item["answer"] for item in own["reference_items"]]
    assert suites["json"]["result"]["metrics"]["valid"]["n"] == 2


def test_a_base_model_continues_the_prompt(models: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    suite, output = tmp_path / "own.yaml", tmp_path / "eval.json"
    suite.write_text(
        "name: own\nmax_tokens: 3\ncases: [{prompt: Go, system: Be brief, checks: [{regex: x}]}]\n"
    )
    done = evaluate(str(models / "damaged"), "-s", str(suite), "-o", str(output))
    assert done.returncode == 0, done.stderr
    item = json.loads(output.read_text())["suites"]["own"]["result"]["items"][0]
    with LLM(str(models / "damaged"), threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        expected = llm.generate("Be brief\n\nGo\n", params)[0].outputs[0].text
    assert item["answer"] == expected


def test_ctrl_c_keeps_what_is_finished(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval.json"
    slow = tmp_path / "slow.yaml"
    case = "  - {prompt: Say something, max_tokens: 200, checks: [{regex: '.'}]}\n"
    slow.write_text("name: slow\ncases:\n" + case * 4000)
    arguments = [str(models / "good"), "--suite", f"perplexity,{slow}", "-o", str(output), "--threads", "1"]
    process = subprocess.Popen(
        [*COMMAND, "eval", *arguments, "--text", str(models / "text.txt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    deadline = time.monotonic() + 120
    while not output.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, ""), err
    assert "perplexity (windows)" in out
    assert list(json.loads(output.read_text())["suites"]) == ["perplexity"]


def test_reference_logits_are_written_once_and_used_again(
    models: Path, evaluate: Evaluate, tmp_path: Path
) -> None:
    kept = tmp_path / "reference.safetensors"
    good, damaged = str(models / "good"), str(models / "damaged")
    common = ["-s", "perplexity", "--reference-logits", str(kept)]
    first = evaluate(damaged, "--against", good, *common)
    assert first.returncode == 0, first.stderr
    second = evaluate(damaged, *common)
    assert second.stdout == first.stdout
    third = evaluate(damaged, *common, "--tokens", "500")
    assert third.returncode == 1
    assert "something else" in third.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "mmlu"], "There is no suite 'mmlu': choose of perplexity,"),
        (["--suite", "perplexity", "--tokenizer", "x"], "--tokenizer is for models behind an --endpoint"),
        (["--suite", "json", "--endpoint", "127.0.0.1:9"], "is not the URL of an endpoint"),
        (["--suite", "json", "--reference-logits", "x"], "which was not chosen"),
        (["--suite", "perplexity", "--reference-logits", "none"], "--against REF says"),
        (["--suite", "perplexity", "--text", "nothing.txt"], "The text nothing.txt cannot be read"),
        (["--gate", "none.yaml"], "none.yaml cannot be read"),
        (["--gate", "default"], "default compares with a reference: name one with --against"),
        (["--suite", "humaneval"], "allow it with --execute-code"),
        (["--unsafe-without-isolation"], "--execute-code says that code may run"),
        (["--harness-path", "."], "no task was chosen"),
        (["--output", "no/folder.json"], "The folder of no/folder.json does not exist"),
    ],
)
def test_bad_input_gets_one_line(
    models: Path, evaluate: Evaluate, arguments: list[str], message: str
) -> None:
    done = evaluate(str(models / "good"), *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
