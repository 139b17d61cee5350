"""``headrace serve`` with its scheduling options: what a client and a gateway see."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from tests import http
from tests.e2e.running import RunningServer, run, serving

ASK = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
SECRET = "between us"


def test_options_and_headers_reach_the_engine(server: RunningServer) -> None:
    """The answer is that of a server without any of it; what they do shows in status codes and metrics."""
    expected = http.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()
    options = ("--tpot-target-ms", "1", "--priority-aging", "2", "--engine-process")
    with serving(*options, env={"HEADRACE_GATEWAY_CREDENTIAL": SECRET}) as paced:
        url = f"{paced.url}/v1/completions"

        def ask(tenant: str) -> httpx.Response:
            headers = {"x-headrace-gateway": SECRET, "x-headrace-tenant": tenant, "x-headrace-priority": "3"}
            return http.post(url, json=ASK | {"timeout_s": 50.0}, headers=headers, timeout=60)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, ["a", "b", "a", "b"]))
        assert all(answer.json()["choices"] == expected["choices"] for answer in answers)
        # A target below a step's own time leaves prompts one block beside those that decode.
        assert 0 < paced.metric("headrace_step_token_budget") < 30
        assert http.post(url, json=ASK, headers={"x-headrace-gateway": "guess"}).status_code == 401
        late = http.post(url, json=ASK | {"max_tokens": 4000, "timeout_s": 0.2}, timeout=60)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        ended = (
            paced.metric("headrace_deadlines_missed_total"),
            paced.metric("headrace_deadlines_refused_total"),
        )
        assert sum(ended) == 1


def test_wrong_settings_end_in_one_line() -> None:
    for option in ("--tpot-target-ms", "--priority-aging"):
        ended = run("serve", option, "nan")
        assert ended.returncode != 0
        assert "Traceback" not in ended.stderr
