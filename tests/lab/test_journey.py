"""The journey from outside, on a model that is tiny, with loads of seconds: that it runs, not how fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from benchmarks.journey.float_model import float_folder
from benchmarks.journey.results import StepResult, promises
from benchmarks.journey.steps import STEPS, Server, serve_options, servers
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from tests.frontend.byte_model import TEMPLATE, byte_backend
from tests.model.tiny import randomise, save

_ROOT = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-m", "benchmarks.journey", "--quick"]
_FOUND = {"PYTHONPATH": str(Path(headrace.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a byte tokenizer, and a context that holds the system prompt."""
    import transformers

    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    save(randomise(transformers.AutoModelForCausalLM.from_config(config)), folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*_COMMAND, *arguments],
        cwd=_ROOT,
        env=os.environ | _FOUND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_step_is_measured_or_left_out_for_a_reason(tiny_model: Path, tmp_path: Path) -> None:
    process = start(str(tiny_model), "--output", str(tmp_path), "--price-per-hour", "3.6")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "end-to-end latency at equal load" in out and "cost:" in out
    found = json.loads((tmp_path / "journey.json").read_bytes())
    names = [step["name"] for step in found["steps"]]
    assert names == ["transformers", *(step.name for step in STEPS)]
    for step in found["steps"]:
        if step["skipped"]:
            assert "headrace serve has no" in step["skipped"] and f"{step['name']}" in out
            continue
        assert step["failed"] == 0
        assert step["tokens_per_s"] > 0 and step["ttft_ms"] > 0 and step["e2e_ms"] > step["ttft_ms"]
        assert step["cores"] is not None
        assert step["dollars_per_million"] == pytest.approx(1000 / step["tokens_per_s"])
        assert step["accuracy"] is None or step["accuracy"]["kl"] >= 0
    by_name: dict[str, Any] = {step["name"]: step for step in found["steps"]}
    assert "--max-num-seqs 1" in by_name["engine"]["command"]
    assert by_name["engine"]["accuracy"]["kl"] < by_name["4-bit weights"]["accuracy"]["kl"]
    assert by_name["4-bit weights"]["accuracy"] == by_name["speculation"]["accuracy"]  # measured once
    assert by_name["prefix caching"]["cached_share"] > 0.5 > by_name["engine"]["cached_share"]
    assert found["context"]["cpu"] and found["versions"]["torch"] and found["seed"] == 0
    page = (tmp_path / "journey.html").read_text("utf-8")
    assert "<svg" in page and "src=" not in page and "<script" not in page
    assert (tmp_path / "journey.png").read_bytes().startswith(b"\x89PNG")
    assert "| speculation |" in (tmp_path / "journey.md").read_text("utf-8")
    assert (tmp_path / "speculation-full-load.json").exists()
    assert not (tmp_path / ".reference-logits").exists()


def test_ctrl_c_keeps_the_steps_that_were_measured(tiny_model: Path, tmp_path: Path) -> None:
    process = start(str(tiny_model), "--output", str(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("transformers"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted" in out and "Traceback" not in err
    found = json.loads((tmp_path / "journey.json").read_bytes())
    assert found["interrupted"] and found["steps"][0]["tokens_per_s"] > 0
    assert len(found["steps"]) <= 2
    assert (tmp_path / "journey.png").exists()


@pytest.mark.parametrize("arguments", [["--users", "0"], ["--price-per-hour", "-1"], ["./no-such-model"]])
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    process = start(*arguments, "--output", str(tmp_path / "out"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(err.strip().splitlines()) == 1 and arguments[-1].lstrip("-./") in err
    assert not (tmp_path / "out").exists()


def test_a_quantised_file_keeps_its_format_and_options_add_up() -> None:
    known = serve_options()
    float_model, own = Path("float"), Path("own.gguf")
    of = {step.name: server for step, server in servers(STEPS, float_model, own, known)}
    engine, shipped, last = of["engine"], of["4-bit weights"], of["speculation"]
    assert isinstance(engine, Server) and isinstance(shipped, Server) and isinstance(last, Server)
    assert engine.model == float_model
    assert engine.arguments() == [
        "--max-num-seqs",
        "1",
        "--no-prefix-caching",
    ]
    assert shipped.model == own and "--quantization" not in shipped.options
    assert last.numbers == shipped.numbers and list(last.options) == ["--speculative-config"]
    same = {step.name: server for step, server in servers(STEPS, float_model, float_model, known)}
    assert isinstance(same["4-bit weights"], Server)
    assert same["4-bit weights"].options["--quantization"] == "int4"


def test_a_step_that_serve_does_not_know_is_left_out_and_changes_nothing() -> None:
    known = serve_options() - {"--speculative-config"}
    of = {step.name: server for step, server in servers(STEPS, Path("a"), Path("b"), known)}
    assert of["speculation"] == "headrace serve has no --speculative-config"
    assert isinstance(of["prefix caching"], Server)


def test_the_baseline_gets_the_weights_of_the_file(smollm2_path: Path) -> None:
    import ml_dtypes

    folder = float_folder(smollm2_path)
    assert float_folder(folder) == folder
    theirs, ours = open_checkpoint(smollm2_path), open_checkpoint(folder)
    assert ours.architecture.layers == theirs.architecture.layers
    for name in ("embed.weight", "layers.7.attention.q.weight", "layers.29.feed_forward.down.weight"):
        exact = as_float32(theirs.tensor(name))
        np.testing.assert_array_equal(as_float32(ours.tensor(name)), exact.astype(ml_dtypes.bfloat16))
    text = "The miller's wheel, 12 feet: naïve?"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(smollm2_path).encode(text)
    assert load_tokenizer(folder).chat_template == load_tokenizer(smollm2_path).chat_template


def test_a_missed_target_is_called_missed() -> None:
    first = StepResult(name="a", why="", tokens_per_s=10, dollars_per_million=1.0, ttft_ms=100, e2e_ms=1000)
    last = StepResult(name="b", why="", tokens_per_s=20, dollars_per_million=0.5, ttft_ms=10, e2e_ms=250)
    cost, e2e, ttft = promises([first, last])
    assert "-50%" in cost and cost.endswith("MISSED")
    assert "4.0 times" in e2e and e2e.endswith("MISSED")
    assert "10.0 times" in ttft and ttft.endswith("reached")
    assert promises([first]) == []
