"""`headrace serve --gateway FILE`: a gateway on the server's own port, in its own process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests import http
from tests.e2e.running import RunningServer, called, run, serving
from tests.gateway.running import events, free_port, metric_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Count from one to twenty."}],
    "max_tokens": 24,
    "temperature": 0,
}
KEY = "an-admin-key-of-some-length"
FILE = """
tenants:
  acme: {}
  other: {}
  trial: {limits: {requests_per_minute: 2}}
tokenization: {min_tokens: 1, timeout_ms: 60000}
admin: {key_env: ADMIN_KEY, port: %d}
"""


class Embedded:
    """The server, its file, and keys of its tenants."""

    def __init__(self, server: RunningServer, file: Path, admin: int) -> None:
        self.server, self.file = server, file
        self.admin = f"http://127.0.0.1:{admin}"
        self.keys = {tenant: self.key(tenant) for tenant in ("acme", "other", "trial")}

    def key(self, tenant: str) -> str:
        """A new one, as the command makes it while the server runs."""
        made = called("gateway", "keys", "create", str(self.file), "--tenant", tenant)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def ask(self, body: dict[str, Any], tenant: str = "acme", path: str = CHAT) -> httpx.Response:
        """One request of a tenant's."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return http.post(self.server.url + path, json=body, headers=headers, timeout=60)

    def wait_idle(self) -> None:
        """Neither the engine nor the gateway has anything in hand."""
        self.server.wait_idle()
        deadline = time.monotonic() + 60
        while busy := self._busy():
            assert time.monotonic() < deadline, busy
            time.sleep(0.01)

    def _busy(self) -> dict[str, dict[str, float]]:
        page, busy = http.get(f"{self.server.url}/metrics").text, {}
        for name in ("requests_running", "requests_waiting", "upstream_requests", "upstream_tokens"):
            found = metric_of(page, name)
            assert found, name
            busy[name] = {labels: value for labels, value in found.items() if value}
        return {name: values for name, values in busy.items() if values}


@pytest.fixture(scope="module")
def embedded(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("embedded")
    file, admin = folder / "gateway.yaml", free_port()
    file.write_text(FILE % admin)
    with serving("--gateway", str(file), env={"ADMIN_KEY": KEY}, log=folder / "log") as server:
        yield Embedded(server, file, admin)


def test_answers_are_the_servers_own(server: RunningServer, embedded: Embedded) -> None:
    direct = http.post(server.url + CHAT, json=QUESTION, timeout=60).json()
    whole = embedded.ask(QUESTION)
    assert whole.json()["choices"] == direct["choices"]
    assert whole.headers["x-headrace-cache"] == "miss"
    stream = embedded.ask(QUESTION | {"stream": True})
    chunks = [json.loads(event) for event in events(stream)[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == direct["choices"][0]["message"]["content"]
    assert stream.headers["x-headrace-cache"] == "hit"
    uncached = embedded.ask(QUESTION | {"stream": True, "temperature": 0.5, "seed": 1})
    assert uncached.headers["x-headrace-upstream"] == "local"
    assert events(uncached)[-1] == "[DONE]"
    embedded.wait_idle()


def test_nobody_gets_in_before_the_gateway_is_there(smollm2_path: Path, tmp_path: Path) -> None:
    """While the model is loaded, and in the moment when it is: 503, then 401, and never an answer."""
    file, port = tmp_path / "gateway.yaml", free_port()
    file.write_text("tenants: {acme: {}}")
    seen: list[int] = []
    server = RunningServer("--gateway", str(file), "--port", str(port))
    try:
        while 401 not in seen:
            assert server.process.poll() is None
            for path in (TEXT, "/tokenize"):
                with contextlib.suppress(httpx.TransportError):
                    asked = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 1}
                    seen.append(httpx.post(f"http://127.0.0.1:{port}{path}", json=asked).status_code)
    finally:
        server.process.kill()
        server.process.wait()
    assert {*seen} <= {401, 503}, seen


def test_everybody_needs_a_key_and_has_quotas(embedded: Embedded) -> None:
    tokens = {"model": "smollm2-135m", "prompt": "Once"}
    assert httpx.post(f"{embedded.server.url}/tokenize", json=tokens).status_code == 401
    assert embedded.ask(tokens, path="/tokenize").json()["count"] == 1
    for path in ("/v1/models", "/v1/models/smollm2-135m", "/v1/requests/chatcmpl-1"):
        assert http.get(embedded.server.url + path).status_code in (401, 404)
    assert http.post(embedded.server.url + CHAT, json=QUESTION).status_code == 401
    statuses = [embedded.ask(QUESTION | {"max_tokens": 1}, "trial").status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    told = called("gateway", "usage", str(embedded.file), "--json")
    assert {row["group"]: row["requests"] for row in json.loads(told.stdout)}["trial"] == 2


def test_the_rest_is_the_servers(embedded: Embedded) -> None:
    url = embedded.server.url
    assert http.get(f"{url}/health").json() == {"status": "ok"}
    assert http.get(f"{url}/health/readiness").status_code == 200
    assert "swagger" in http.get(f"{url}/docs").text
    page = http.get(f"{url}/metrics").text
    names = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"headrace_gateway_cost_usd_total", "vllm:num_requests_running"} <= set(names)
    assert re.search(r'^headrace_gateway_token_counts_total{result="asked"} [1-9]', page, re.MULTILINE)
    assert 'headrace_gateway_token_counts_total{result="failed"}' not in page


def test_what_the_server_refuses_is_told_in_its_words(embedded: Embedded) -> None:
    answer = embedded.ask(QUESTION | {"temperature": -1})
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]
    long = embedded.ask(QUESTION | {"messages": [{"role": "user", "content": "long " * 20_000}]})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert embedded.ask(QUESTION | {"model": "none"}).status_code == 404
    embedded.wait_idle()


def test_tenants_share_no_prefix_cache(embedded: Embedded) -> None:
    """It knows tenants apart although nobody has set a credential."""
    prompt = {"prompt": "The mill stands on the river Ouse, " * 12, "max_tokens": 1, "model": "smollm2-135m"}

    def cached(tenant: str) -> int:
        usage = embedded.ask(prompt | {"temperature": 1}, tenant, TEXT).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("acme") == 0
    assert cached("acme") > 0
    assert cached("other") == 0


def test_a_client_that_leaves_frees_the_engine(embedded: Embedded) -> None:
    body = QUESTION | {"max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 1}
    headers = {"authorization": f"Bearer {embedded.keys['acme']}"}
    for _ in range(3):
        with http.stream(
            "POST", embedded.server.url + CHAT, json=body, headers=headers, timeout=60
        ) as answer:
            next(answer.iter_raw())
    embedded.wait_idle()


def test_it_is_run_like_any_gateway(embedded: Embedded) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    [upstream] = http.get(f"{embedded.admin}/upstreams", headers=headers).json()
    assert (upstream["name"], upstream["kind"], upstream["models"]) == ("local", "headrace", ["smollm2-135m"])
    embedded.file.write_text(
        embedded.file.read_text().replace("other: {}", "other: {limits: {max_output: 3}}")
    )
    assert http.post(f"{embedded.admin}/reload", headers=headers).status_code == 200
    assert embedded.ask(QUESTION, "other").json()["error"]["param"] == "max_tokens"
    embedded.file.write_text(
        embedded.file.read_text().replace("other: {limits: {max_output: 3}}", "other: {}")
    )
    embedded.server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 60
    while embedded.ask(QUESTION | {"max_tokens": 4}, "other").status_code != 200:
        assert time.monotonic() < deadline, "the file was not read again"


@pytest.fixture(scope="module")
def api(embedded: Embedded) -> Any:
    """What the server says of its routes, all of which are the gateway's here; answers kept short."""
    schema = http.get(f"{embedded.server.url}/openapi.json").json()
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        kind = schema["components"]["schemas"][name]
        kind["required"] = [*kind.get("required", []), "max_tokens", "model"]
        fields = kind["properties"]
        fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 2}
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
        fields["timeout_s"] = {"type": "number", "minimum": 60}
        fields["model"] = {"enum": ["smollm2-135m"]}
    schema["components"]["schemas"]["ChatCompletionRequest"]["properties"].pop("max_completion_tokens")
    loaded = schemathesis.openapi.from_dict(schema)
    loaded.config.update(base_url=embedded.server.url)
    return loaded


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", CHAT, RIGHT),
        ("POST", CHAT, WRONG),
        ("POST", TEXT, RIGHT),
        ("POST", TEXT, WRONG),
        ("POST", "/v1/embeddings", WRONG),
        ("GET", "/v1/models", RIGHT),
        ("GET", "/v1/models/{name}", RIGHT),
    ],
)
def test_the_gateway_answers_as_documented(
    embedded: Embedded, api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    """Requests made from the schema, right and wrong: never a 5xx, never an undocumented shape."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        response = case.call(timeout=30, headers={"authorization": f"Bearer {embedded.keys['acme']}"})
        assert response.status_code < 500, response.text
        case.validate_response(
            response,
            checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    answers()


def test_nothing_is_left_after_all_that(embedded: Embedded) -> None:
    embedded.wait_idle()


def test_it_drains_and_ends_with_0(embedded: Embedded, tmp_path: Path) -> None:
    """The last test of this server's: a stream that is under way is told to its end."""
    body = QUESTION | {"max_tokens": 32, "ignore_eos": True, "stream": True, "temperature": 1}
    before = embedded.server.metric("vllm:generation_tokens_total")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(embedded.ask, body)
        while embedded.server.metric("vllm:generation_tokens_total") == before:
            pass
        assert embedded.server.stop(timeout_s=60) == 0
        answer = running.result(60)
    assert answer.status_code == 200
    assert events(answer)[-1] == "[DONE]"
    told = json.loads(called("gateway", "usage", str(embedded.file), "--json").stdout)
    assert all(row["failed"] == 0 for row in told if row["group"] == "trial")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("tenants: {acme: {}}", ["--api-key", "a"], "--api-key does not go with --gateway"),
        ("tenants: {acme: {}}", ["--checkpoint-path", "x"], "--checkpoint-path does not go with --gateway"),
        ("tenants: {acme: {limits: {concurency: 1}}}", [], "gateway.yaml:1: tenants.acme.limits.concurency"),
        ("aliases: {a: b}", [], "gateway.yaml:1: aliases.a"),
        (
            "upstreams: {here: {url: in-process, models: {large: {}}}}",
            [],
            "upstreams.here: large is not served in this process, but smollm2-135m",
        ),
        ("upstreams: {here: {url: in-process, kind: vllm, models: {m: {}}}}", [], "of kind headrace"),
        ("tenants: {acme: {}}", ["--served-model-name", "a b"], "a b is no name for a gateway's model"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tmp_path: Path, text: str, options: list[str], said: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    ended = run("serve", "--port", "0", "--gateway", str(file), *options)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: {acme: {}}", "`upstreams` are missing"),
        ("upstreams: {here: {url: in-process, models: {m: {}}}}", "here is in-process"),
    ],
)
def test_a_gateway_of_its_own_has_nothing_in_its_process(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    ended = run("gateway", "run", str(file), "--port", "0")
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_without_a_gateway_nothing_of_it_is_loaded(server: RunningServer) -> None:
    """A plain server is neither slower nor larger for it."""
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "uvloop" in mapped
    assert not re.search("aiohttp|_sqlite3|usearch", mapped)
