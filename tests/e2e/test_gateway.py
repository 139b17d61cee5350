"""The gateway in front of real servers: the same answers as without it, also while one of them dies."""

from __future__ import annotations

import concurrent.futures
import json
import signal
from pathlib import Path
from typing import Any

import httpx

from tests import http
from tests.e2e.running import RunningServer, serving
from tests.gateway.running import events, gateway

QUESTION = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Count from one to twenty."}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


def streamed(answer: httpx.Response) -> str:
    """The text of a whole stream."""
    chunks = [json.loads(event) for event in events(answer)[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def config(*servers: RunningServer) -> dict[str, Any]:
    price = {"input": 1.0, "output": 2.0}
    models = {"smollm2-135m": {"context": 8192, "price": price}}
    return {
        "upstreams": {
            f"replica-{number}": {"url": f"{server.url}/v1", "kind": "headrace", "models": models}
            for number, server in enumerate(servers)
        },
        "authentication": "none",
        "cache": {"enabled": False},
        "health": {"probe_every_s": 0.2, "eject_after": 2},
    }


def test_answers_are_the_servers_own(server: RunningServer, tmp_path: Path) -> None:
    direct = http.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=60).json()
    with gateway(config(server), tmp_path) as made:
        whole = made.client.post("/v1/chat/completions", json=QUESTION).json()
        assert whole["choices"] == direct["choices"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert whole["usage"][name] == direct["usage"][name]
        stream = made.client.post("/v1/chat/completions", json={**QUESTION, "stream": True})
        assert events(stream)[-1] == "[DONE]"
        assert streamed(stream) == direct["choices"][0]["message"]["content"]
        wrong = made.client.post("/v1/chat/completions", json={**QUESTION, "temperature": -1})
        assert wrong.status_code == 400
        assert "temperature" in wrong.json()["error"]["message"]
        made.wait_idle()
        total = made.usage()["default"]
        assert total["completion_tokens"] == 2 * direct["usage"]["completion_tokens"]
        assert total["prompt_tokens"] == 2 * direct["usage"]["prompt_tokens"]
    server.wait_idle()


def test_one_of_two_replicas_is_killed_under_load(server: RunningServer, tmp_path: Path) -> None:
    reference = http.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=60).json()
    text = reference["choices"][0]["message"]["content"]
    with serving("smollm2-135m") as second, gateway(config(server, second), tmp_path) as made:

        def ask(number: int) -> httpx.Response:
            body = {**QUESTION, "stream": number % 2 == 0}
            return made.client.post("/v1/chat/completions", json=body)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, number) for number in range(16)]
            made.wait(lambda: sum(made.metric("requests_total").values()) >= 4, 30)
            made.wait(lambda: made.metric("upstream_requests")['upstream="replica-1"'] > 0, 30)
            second.process.send_signal(signal.SIGKILL)
            done = [answer.result(60) for answer in answers]
        for number, answer in enumerate(done):
            assert answer.status_code == 200, answer.text
            if number % 2:
                assert answer.json()["choices"][0]["message"]["content"] == text
            else:
                assert events(answer)[-1] == "[DONE]", "what the dead one was streaming went on"
                assert streamed(answer) == text
        made.wait(lambda: made.metric("upstream_share")['upstream="replica-1"'] == 0)
        assert ask(0).headers["x-headrace-upstream"] == "replica-0"
        made.wait_idle()
        assert made.usage()["default"]["requests"] == 17
    server.wait_idle()
