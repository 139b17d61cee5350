"""Perplexity and multiple choice of a model behind HTTP: our server, servers of other kinds, and none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.evaluate.divergence import windows_of
from headrace.lab.evaluate.endpoint_client import EndpointError
from headrace.lab.evaluate.endpoint_scoring import EndpointScorer
from tests.e2e.running import run, serving
from tests.lab.data_wheel import offer_cases
from tests.lab.endpoint_server import server
from tests.lab.small_models import TEXT, make_model

Reply = tuple[int, bytes]


def test_our_own_server_scores_as_the_model_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same perplexity and the same choices, by the same kernels, with HTTP in between."""
    offer_cases(tmp_path, monkeypatch)
    model = str(tmp_path / "good")
    make_model(tmp_path / "good")
    (tmp_path / "text.txt").write_text(TEXT)
    suites = ["-s", "perplexity,hellaswag", "--text", str(tmp_path / "text.txt"), "--context-length", "120"]
    reports = []
    with serving(model, "--threads", "1") as running:
        for more in (["--threads", "1"], ["--endpoint", f"{running.url}/v1", "--against", model]):
            output = tmp_path / f"{len(reports)}.json"
            done = run("eval", model, *suites, *more, "-o", str(output))
            assert done.returncode == 0, done.stderr
            reports.append(json.loads(output.read_text())["suites"])
    here, there = (report["perplexity"]["result"] for report in reports)
    assert there["tokenizer"] == here["tokenizer"]
    assert there["windows"] == here["windows"] > 5
    assert there["perplexity"]["n"] == here["perplexity"]["n"]
    assert there["perplexity"]["value"] == pytest.approx(here["perplexity"]["value"], rel=1e-5)
    assert there["perplexity"]["se"] == pytest.approx(here["perplexity"]["se"], rel=1e-4)
    assert there["divergence"] is None
    assert there["loss_ratio"]["ln_ppl_ratio"]["value"] == pytest.approx(0, abs=1e-6)
    items = [[item["scores"] for item in report["hellaswag"]["result"]["items"]] for report in reports]
    assert items[0] == items[1]
    assert "ln(PPL ratio)" in done.stdout


class Oracle:
    """A server over transformers that tells log-probabilities in one of the ways there are."""

    def __init__(self, folder: Path, way: str, *, other_tokens: bool = False) -> None:
        self.model = make_model(folder)
        self.tokenizer = load_tokenizer(folder)
        self.way = way
        self.other_tokens = other_tokens

    def __call__(self, body: dict[str, Any], key: str | None) -> Reply:
        prompt = body["prompt"]
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if self.other_tokens and isinstance(prompt, str):
            token_ids = token_ids[:-2]
        with torch.no_grad():
            rows = torch.log_softmax(self.model(input_ids=torch.tensor([token_ids])).logits[0].double(), -1)
        values = [float(rows[at - 1, token_ids[at]]) for at in range(1, len(token_ids))]
        choice: dict[str, Any] = {"text": "x", "index": 0}
        if "prompt_logprobs" in body:
            if self.way != "prompt_logprobs":
                return 400, b'{"error": {"message": "unknown parameter `prompt_logprobs`"}}'
            pairs = zip(token_ids[1:], values, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": it}} for token, it in pairs)]
        elif body.get("echo") and self.way == "echo":
            tokens = [*(str(token) for token in token_ids), "x"]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [None, *values, -1.0]}
        usage = {"prompt_tokens": len(token_ids), "completion_tokens": 1}
        return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo"])
def test_each_way_of_telling_is_found_out(tmp_path: Path, way: str) -> None:
    oracle = Oracle(tmp_path, way)
    windows = windows_of(oracle.tokenizer.encode(TEXT), "llama.cpp", 64)[:3]
    with server(oracle) as url:
        scorer = EndpointScorer(url, "model", oracle.tokenizer, 64)
        losses = scorer.losses(windows)
        scored = scorer.continuations(windows[0].token_ids[:20], [windows[0].token_ids[20:23], [5]])
        scorer.close()
    for window, found in zip(windows, losses, strict=True):
        with torch.no_grad():
            logits = oracle.model(input_ids=torch.tensor([window.token_ids])).logits[0].double()
        rows = torch.log_softmax(logits, -1).numpy()[window.first - 1 : -1]
        expected = -rows[np.arange(len(rows)), window.token_ids[window.first :]]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [len(found) for found in scored] == [3, 1]


def test_a_server_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for way in ("prompt_logprobs", "echo"):
        oracle = Oracle(tmp_path, way, other_tokens=True)
        with server(oracle) as url, pytest.raises(ConfigError, match="own with --tokenizer"):
            EndpointScorer(url, "model", oracle.tokenizer, 64)


def test_a_server_that_tells_nothing_is_named_as_that(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, "neither")
    with server(oracle) as url, pytest.raises(ConfigError, match="neither as prompt_logprobs nor with echo"):
        EndpointScorer(url, "model", oracle.tokenizer, 64)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, b'{"error": {"message": "who are you"}}'), "who are you .*HEADRACE_API_KEY"),
        ((503, b"busy"), "HTTP 503: busy"),
    ],
)
def test_a_server_that_cannot_be_asked_is_no_server_that_tells_nothing(
    tmp_path: Path, reply: Reply, message: str
) -> None:
    make_model(tmp_path)
    with server(lambda body, key: reply) as url, pytest.raises(EndpointError, match=message):
        EndpointScorer(url, "model", load_tokenizer(tmp_path), 64, retry_delay_s=0.01)


@pytest.mark.parametrize(
    "logprobs",
    [
        [None, {"7": {"logprob": -1.0}}],
        [None, *[{"7": {"logprob": math.nan}}] * 3, "text"],
        "text",
        [None, *[{"7": {}}] * 63],
    ],
)
def test_an_answer_that_makes_no_sense_is_no_score(tmp_path: Path, logprobs: Any) -> None:
    """The probe goes well, the text that counts does not."""
    oracle = Oracle(tmp_path, "prompt_logprobs")

    def respond(body: dict[str, Any], key: str | None) -> Reply:
        if isinstance(body["prompt"], str):
            return oracle(body, key)
        return 200, json.dumps({"choices": [{"prompt_logprobs": logprobs}]}).encode()

    windows = windows_of(oracle.tokenizer.encode(TEXT), "windows", 64)[:1]
    with server(respond) as url:
        scorer = EndpointScorer(url, "model", oracle.tokenizer, 64)
        with pytest.raises(EndpointError, match=r"no log-probabilities|other tokens"):
            scorer.losses(windows)
        scorer.close()


def test_without_a_tokenizer_at_hand_the_option_is_named() -> None:
    done = run("eval", "far-away", "--endpoint", "http://127.0.0.1:9/v1", "-s", "hellaswag")
    assert done.returncode == 1
    assert "name a model or a folder that has it with --tokenizer" in done.stderr
