"""lm-evaluation-harness on our engine: the same items give the same scores as our own suites do."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.frontend.tokenizer import load_tokenizer
from tests.e2e.running import run
from tests.lab.data_wheel import offer_cases
from tests.lab.small_models import TEXT, make_model

CHOICES = """\
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: endings
doc_to_target: right
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """\
task: local_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
ANSWERS = """\
task: local_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["never said"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def test_without_lm_eval_the_extra_is_named(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm-eval is installed")
    make_model(tmp_path / "good")
    done = run("eval", str(tmp_path / "good"), "--harness", "arc_easy")
    assert done.returncode == 1
    assert done.stderr == "headrace: --harness needs lm-eval: pip install 'headrace[harness]'.\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, another, and tasks in lm-eval's form over local files."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'headrace[harness]'")
    offer_cases(tmp_path, monkeypatch)
    make_model(tmp_path / "good")
    make_model(tmp_path / "other", noise=0.5)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, task in (("choices", CHOICES), ("texts", TEXTS), ("answers", ANSWERS)):
        (tasks / f"{name}.yaml").write_text(task.format(folder=tasks))
    from headrace.lab.evaluate.choices import hellaswag

    rows = [
        {"context": case.context, "endings": [text[1:] for text in case.continuations], "right": case.right}
        for case in hellaswag()
    ]
    (tasks / "choices.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    texts = [{"text": TEXT[:90]}, {"text": TEXT * 8}]
    (tasks / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return tmp_path


def rolling_perplexity(folder: Path) -> float:
    """Per byte, by transformers: full windows one after the other, the last as far back as it can see."""
    tokenizer = load_tokenizer(folder / "good")
    model = make_model(folder / "again")
    longest = model.config.max_position_embeddings - 1
    total, length = 0.0, 0
    for text in (TEXT[:90], TEXT * 8):
        token_ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        done = 0
        while done < len(token_ids) - 1:
            stop = min(done + longest, len(token_ids) - 1)
            start = done if done == 0 else max(0, stop - longest)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([token_ids[start : stop + 1]])).logits[0].double()
            rows = torch.log_softmax(logits, -1)
            total += sum(float(rows[at - 1 - start, token_ids[at]]) for at in range(done + 1, stop + 1))
            done = stop
        length += len(text.encode())
    return math.exp(-total / length)


def test_the_same_items_give_the_same_scores(folder: Path) -> None:
    output = folder / "eval.json"
    done = run(
        *("eval", str(folder / "good"), "--against", str(folder / "other"), "--threads", "1"),
        *("--suite", "hellaswag", "--harness", "local_choices,local_texts,local_answers"),
        *("--harness-path", str(folder / "tasks"), "-o", str(output)),
    )
    assert done.returncode == 0, done.stderr
    suites = {name: record["result"] for name, record in json.loads(output.read_text())["suites"].items()}
    ours, theirs = suites["hellaswag"], suites["harness:local_choices"]
    assert [item["scores"] for item in theirs["items"]] == [item["scores"] for item in ours["items"]]
    assert theirs["against"] == ours["against"]
    assert theirs["metrics"] == ours["metrics"]

    perplexity = suites["harness:local_texts"]["metrics"]["byte_perplexity"]
    assert perplexity["value"] == pytest.approx(rolling_perplexity(folder), rel=0.01)
    assert "not compared item by item" in done.stdout

    answers = suites["harness:local_answers"]["items"]
    with LLM(str(folder / "good"), threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        expected = llm.generate([TEXT[:90]], params)[0].outputs[0].text
    assert answers[0]["answer"] == expected


def test_a_task_that_does_not_exist_is_named(folder: Path) -> None:
    done = run("eval", str(folder / "good"), "--harness", "no_such_task", "--threads", "1")
    assert done.returncode == 1
    assert "lm-eval has no task 'no_such_task'" in done.stderr.splitlines()[-1]
