"""``headrace serve --speculative-config``: the same answers, and drafts in the metrics."""

from __future__ import annotations

import json
from pathlib import Path

from tests import http
from tests.e2e.running import RunningServer, run, serving

TEXT = "The brig Adelaide arrived from Lisbon with cork, salt and oranges under Captain Moreira."
ASK = {
    "prompt": f"{TEXT}\n{TEXT}\n{TEXT[:30]}",
    "max_tokens": 12,
    "temperature": 0.7,
    "seed": 5,
    "logprobs": 1,
}


def test_the_same_answer_as_without(server: RunningServer, smollm2_path: Path) -> None:
    expected = http.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()
    with serving("--speculative-config", '{"method": "ngram"}', "--engine-process") as drafting:
        answer = http.post(f"{drafting.url}/v1/completions", json=ASK, timeout=60).json()
        assert answer["choices"] == expected["choices"]
        assert answer["system_fingerprint"] == expected["system_fingerprint"]
        assert drafting.metric("headrace_draft_tokens_accepted_total") > 0
    assert server.metric("headrace_draft_tokens_total") == 0


def test_a_draft_model_gives_the_same_answer(server: RunningServer, smollm2_path: Path) -> None:
    """Here the model drafts for itself: that shows nothing of speed, and all of how it is put together."""
    ask = ASK | {"temperature": 0.0, "structured_outputs": {"regex": "[ -~]{20,60}"}}
    expected = http.post(f"{server.url}/v1/completions", json=ask, timeout=60).json()
    config = {
        "method": "draft_model",
        "model": str(smollm2_path),
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    with serving("--speculative-config", json.dumps(config), "--engine-process") as drafting:
        answer = http.post(f"{drafting.url}/v1/completions", json=ask, timeout=60).json()
        assert answer["choices"] == expected["choices"]
        assert drafting.metric("headrace_draft_tokens_accepted_total") > 3
        assert drafting.metric("headrace_draft_seconds_total") > 0
        drafting.wait_idle()


def test_a_wrong_setting_ends_in_one_line() -> None:
    for text, says in (
        ("{", "not JSON"),
        ('{"method": "ngram", "k": 1}', "has no 'k'"),
        ('{"method": "draft_model"}', "must name"),
    ):
        ended = run("serve", "--speculative-config", text)
        assert ended.returncode != 0
        assert says in ended.stderr
        assert "Traceback" not in ended.stderr
