"""The admin API: its own port and key, described, and in charge of what runs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests import http
from tests.e2e.running import called, run
from tests.gateway.running import RunningGateway, Upstreams, decent, free_port, gateway
from tests.gateway.test_reload import held, rewrite

KEY = "0123456789abcdef-admin"
ENV = {"ADMIN_KEY": KEY}
Admin = tuple[RunningGateway, httpx.Client]


def config_of(url: str, port: int) -> dict[str, Any]:
    return {
        "upstreams": {"one": {"url": url, "models": {"m": {}, "m2": {}}}},
        "releases": {"team/chat": {"versions": {"v1": {"model": "m"}, "v2": {"model": "m2"}}}},
        "tenants": {
            "acme": {
                "weight": 2,
                "limits": {"tokens_per_day": 10_000},
                "model_limits": {"m": {"requests_per_minute": 100}},
                "apps": {"web": {"limits": {"concurrency": 3}}},
            }
        },
        "admin": {"key_env": "ADMIN_KEY", "port": port},
    }


@pytest.fixture(scope="module")
def admin(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    _, url = upstreams.start()
    port = free_port()
    with gateway(config_of(url, port), tmp_path_factory.mktemp("admin"), ENV) as made:
        address = f"http://127.0.0.1:{port}"
        with http.client(address, {"authorization": f"Bearer {KEY}"}) as client:
            made.wait(lambda: listens(client))
            yield made, client


def listens(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def command(made: RunningGateway, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    before = dict(os.environ)
    os.environ.update(ENV if env is None else env)
    try:
        ended = called("gateway", arguments[0], str(made.file), *arguments[1:])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ended.returncode, ended.stdout, ended.stderr


def test_only_its_own_key_opens_it(admin: Admin) -> None:
    made, client = admin
    tenants = made.key("acme")["authorization"]
    for wrong in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", tenants, f"Bearer {KEY[:-1]}"):
        for path in ("/keys", "/openapi.json", "/health"):
            answer = http.get(f"{client.base_url}{path}", headers={"authorization": wrong})
            assert answer.status_code == 401, wrong
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert made.client.get("/keys").status_code == 404, "not on the gateway's port"
    assert made.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 401


def test_keys_are_made_used_rotated_and_revoked(admin: Admin) -> None:
    made, client = admin
    asked = {"tenant": "acme", "app": "web", "name": "site"}
    key = client.post("/keys", json=asked)
    assert key.status_code == 201
    ident, secret = key.json()["id"], key.json()["secret"]

    def works(secret: str) -> int:
        return made.chat({"authorization": f"Bearer {secret}"}).status_code

    assert works(secret) == 200
    fresh = client.post(f"/keys/{ident}/rotate").json()["secret"]
    assert (works(secret), works(fresh)) == (401, 200)
    assert client.delete(f"/keys/{ident}").json()["revoked_at"] is not None
    assert works(fresh) == 401
    assert client.delete(f"/keys/{ident}").status_code == 404
    [listed] = [known for known in client.get("/keys?tenant=acme").json() if known["id"] == ident]
    assert (listed["app"], listed["name"]) == ("web", "site")
    assert client.get("/keys?tenant=other").json() == []
    for wrong, status in (
        ({"tenant": "nobody"}, 409),
        ({"tenant": "acme", "app": "none"}, 409),
        ({"app": "web"}, 400),
        ({**asked, "more": 1}, 400),
        ([], 400),
    ):
        assert client.post("/keys", json=wrong).status_code == status, wrong
    assert client.post("/keys", content=b"x" * 100_000).status_code == 413


def test_use_and_usage_are_told(admin: Admin) -> None:
    made, client = admin
    headers = made.key("acme")
    before = client.get("/tenants").json()[0]
    assert made.chat(headers).status_code == 200
    [tenant] = client.get("/tenants").json()
    assert tenant["use"]["limits"] == {"tokens_per_day": 10_000}
    assert tenant["use"]["tokens_today"] == before["use"]["tokens_today"] + 6
    [model] = tenant["models"]
    assert model["scope"] == "share:acme|m"
    assert model["requests_in_minute"] == before["models"][0]["requests_in_minute"] + 1
    assert tenant["apps"][0]["limits"] == {"concurrency": 3}
    [usage] = client.get("/usage?by=tenant&days=1").json()
    assert (usage["group"], usage["failed"]) == ("acme", 0)
    assert client.get("/usage?by=shoe").status_code == 400
    assert client.get("/usage?days=-1").status_code == 400


def test_releases_are_switched_at_once(admin: Admin) -> None:
    made, client = admin
    headers = made.key("acme")

    def version() -> str:
        return str(made.chat(headers, model="team/chat").headers["x-headrace-version"])

    assert client.post("/releases/team/chat/start", json={"version": "v2", "ab": 99.9}).status_code == 200
    assert client.post("/releases/team/chat/start", json={"version": "v2"}).status_code == 409
    assert client.get("/releases").json()[0]["weight"] == 99.9
    assert client.post("/releases/team/chat/promote", json={}).json()["version"] == "v2"
    assert version() == "v2"
    assert client.post("/releases/team/chat/rollback").status_code == 200
    assert version() == "v1"
    report = client.get("/releases/team/chat").json()
    assert [event["what"] for event in report["history"]] == ["rolled_back", "promoted", "started"]
    assert client.get("/releases/none").status_code == 404
    assert client.post("/releases/team/chat/promote", json={"version": "v9"}).status_code == 409


def test_an_upstream_is_drained_and_comes_back(upstreams: Upstreams, tmp_path: Path) -> None:
    streamer, url = upstreams.start()
    release = threading.Event()
    streamer.behaviour = held(release)
    port = free_port()
    with gateway(config_of(url, port), tmp_path, ENV) as made:
        headers = made.key("acme")
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(made.chat(headers, stream=True)))
        asking.start()
        made.wait(lambda: len(streamer.asked) == 1)
        code, out, _ = command(made, "upstreams", "--drain", "one")
        assert code == 0
        assert "draining" in out
        refused = made.chat(headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "drained" in refused.json()["error"]["message"]
        assert made.client.get("/health/readiness").status_code == 503
        release.set()
        asking.join()
        assert "[DONE]" in answers[0].text
        made.wait_idle()
        streamer.behaviour = decent
        [upstream] = json.loads(command(made, "upstreams", "--resume", "one", "--json")[1])
        assert (upstream["drained"], upstream["in_flight"]) == (False, 0)
        assert made.chat(headers).status_code == 200
        code, _, err = command(made, "upstreams", "--drain", "two")
        assert (code, err.count("\n")) == (1, 1)
        assert "there is: one" in err


def test_the_configuration_is_read_again(admin: Admin) -> None:
    made, client = admin
    kept = made.file.read_text()
    try:
        config = yaml.safe_load(kept)
        rewrite(made, tenants=config["tenants"] | {"late": {}})
        assert "late" in command(made, "reload")[1]
        assert client.post("/keys", json={"tenant": "late"}).status_code == 201
        rewrite(made, aliases={"a": "none"})
        refused = client.post("/reload")
        assert refused.status_code == 409
        assert "aliases.a" in refused.json()["error"]["message"]
        assert [tenant["tenant"] for tenant in client.get("/tenants").json()] == ["acme", "late"]
    finally:
        made.file.write_text(kept)
        assert client.post("/reload").status_code == 200


def test_the_cache_is_cleared(admin: Admin) -> None:
    made, client = admin
    headers = made.key("acme")

    def state() -> str:
        return str(made.chat(headers, temperature=0).headers["x-headrace-cache"])

    state()
    assert state() == "hit"
    assert "forgot 1 entry" in called("gateway", "cache", "clear", str(made.file)).stdout
    assert state() == "miss"
    [held] = client.get("/cache").json()
    assert (held["kind"], held["tenant"], held["entries"], held["questions"]) == ("answer", "acme", 1, 0)
    assert client.post("/cache/clear", params={"tenant": "nobody"}).json() == {"answers": 0}
    assert client.post("/cache/clear", params={"kind": "nonsense"}).status_code == 400
    assert state() == "hit"
    assert client.post("/cache/clear", params={"tenant": "acme"}).json() == {"answers": 1}
    assert state() == "miss"


def test_the_commands_say_what_is_wrong(admin: Admin, tmp_path: Path) -> None:
    made, _ = admin
    code, _, err = command(made, "reload", env={"ADMIN_KEY": "x" * 20})
    assert (code, err.count("\n")) == (1, 1)
    assert "key is missing or wrong" in err
    assert "ADMIN_KEY must be set" in command(made, "reload", env={"ADMIN_KEY": ""})[2]
    path = tmp_path / "gateway.yaml"
    config = config_of("http://127.0.0.1:1/v1", free_port())
    path.write_text(yaml.safe_dump(config))
    for key, said in (("short", "must have 16 characters"), ("", "ADMIN_KEY must be set")):
        os.environ["ADMIN_KEY"] = key
        try:
            ended = run("gateway", "run", str(path), "--port", "0")
        finally:
            del os.environ["ADMIN_KEY"]
        assert ended.returncode == 1
        assert said in ended.stderr


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("GET", "/health", RIGHT),
        ("GET", "/keys", RIGHT),
        ("POST", "/keys", RIGHT),
        ("POST", "/keys", WRONG),
        ("POST", "/keys/{key}/rotate", RIGHT),
        ("DELETE", "/keys/{key}", RIGHT),
        ("GET", "/tenants", RIGHT),
        ("GET", "/usage", WRONG),
        ("GET", "/releases", RIGHT),
        ("GET", "/releases/{name}", RIGHT),
        ("POST", "/releases/{name}/start", RIGHT),
        ("POST", "/releases/{name}/start", WRONG),
        ("POST", "/releases/{name}/promote", WRONG),
        ("POST", "/releases/{name}/rollback", RIGHT),
        ("GET", "/upstreams", RIGHT),
        ("POST", "/upstreams/{name}/drain", RIGHT),
        ("POST", "/upstreams/{name}/resume", RIGHT),
        ("POST", "/reload", RIGHT),
        ("GET", "/templates", RIGHT),
        ("GET", "/templates/{name}", RIGHT),
        ("PUT", "/templates/{name}", RIGHT),
        ("PUT", "/templates/{name}", WRONG),
        ("DELETE", "/templates/{name}", RIGHT),
        ("GET", "/cache", RIGHT),
        ("POST", "/cache/clear", RIGHT),
    ],
)
def test_it_is_as_it_describes_itself(admin: Admin, method: str, path: str, mode: GenerationMode) -> None:
    """Whatever fits its description, or does not, gets an answer that the description knows."""
    _, client = admin
    loaded: Any = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    loaded.config.update(base_url=str(client.base_url))

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=loaded[path][method].as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        response = case.call(timeout=30, headers={"authorization": f"Bearer {KEY}"})
        assert response.status_code < 500, response.text
        case.validate_response(
            response,
            checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    answers()


def test_all_routes_are_tried_above(admin: Admin) -> None:
    _, client = admin
    described = client.get("/openapi.json").json()["paths"]
    [marks] = [mark for mark in test_it_is_as_it_describes_itself.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    tried = {(method, path) for method, path, _ in marks.args[1]}
    assert tried == {(method.upper(), path) for path, methods in described.items() for method in methods}
