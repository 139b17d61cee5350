"""Tenants have apps, apps have keys, and each level and each model has its limits."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from tests.e2e.running import called
from tests.gateway.conftest import Places
from tests.gateway.running import RunningGateway, Upstreams, gateway

TENANT = {
    "limits": {"requests_per_minute": 9},
    "key_limits": {"requests_per_minute": 4},
    "model_limits": {"b": {"requests_per_minute": 2, "max_output": 6}},
    "apps": {
        "web": {"limits": {"requests_per_minute": 5, "models": ["a", "b"]}},
        "jobs": {"key_limits": {"requests_per_minute": 7, "max_output": 2}},
    },
}


@pytest.fixture
def made(upstreams: Upstreams, places: Places, tmp_path: Path) -> Iterator[RunningGateway]:
    _, url = upstreams.start()
    config: dict[str, Any] = {
        **places().config,
        "upstreams": {"one": {"url": url, "models": {"a": {}, "b": {}, "c": {}}}},
        "tenants": {"acme": TENANT, "other": {}},
        "model_limits": {"c": {"requests_per_minute": 3, "max_context": 50}},
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path) as running:
        yield running


def asked(made: RunningGateway, headers: dict[str, str], times: int, model: str = "a") -> list[int]:
    return [made.chat(headers, model=model, max_tokens=1).status_code for _ in range(times)]


def message(made: RunningGateway, headers: dict[str, str], model: str = "a", **body: Any) -> str:
    answer = made.chat(headers, model=model, **body)
    assert answer.status_code >= 400
    return str(answer.json()["error"]["message"])


def test_each_level_has_its_limit(made: RunningGateway) -> None:
    one, two = made.key("acme", "web"), made.key("acme", "web")
    assert asked(made, one, 5) == [200] * 4 + [429]
    assert message(made, one).startswith("key: requests a minute: 4")
    assert asked(made, two, 2) == [200, 429]
    assert message(made, two).startswith("app: requests a minute: 5")
    jobs = made.key("acme", "jobs")
    assert message(made, jobs, max_tokens=3).startswith("`max_tokens`: 3, but this key may ask for 2")
    assert asked(made, jobs, 5) == [200] * 4 + [429]
    assert message(made, jobs, max_tokens=1).startswith("tenant: requests a minute: 9")
    used = made.usage("app")
    assert (used["acme/web"]["requests"], used["acme/jobs"]["requests"]) == (5, 4)


def test_a_models_limits_hold_for_all_and_a_tenants_for_itself(made: RunningGateway) -> None:
    acme, other = made.key("acme"), made.key("other")
    assert asked(made, acme, 3, "b") == [200, 200, 429]
    assert message(made, acme, "b", max_tokens=1).startswith(
        "tenant's use of the model: requests a minute: 2"
    )
    assert message(made, acme, "b", max_tokens=7).startswith("`max_tokens`: 7")
    assert asked(made, other, 3, "b") == [200] * 3, "others have no such limit"
    assert asked(made, other, 2, "c") == [200, 200]
    assert asked(made, acme, 2, "c") == [200, 429]
    assert "model: requests a minute: 3" in message(made, other, "c", max_tokens=1)
    assert "context of 50 tokens" in message(made, other, "c", max_tokens=60)
    app = made.key("acme", "web")
    assert made.chat(app, model="c").status_code == 403


def test_apps_are_named_and_a_key_of_one_that_is_gone_is_refused(made: RunningGateway) -> None:
    created = called("gateway", "keys", "create", str(made.file), "--tenant", "acme", "--app", "web")
    web = {"authorization": f"Bearer {created.stdout.strip()}"}
    assert made.chat(web, model="a").status_code == 200
    listed = json.loads(called("gateway", "keys", "list", str(made.file), "--json").stdout)
    assert listed[-1]["app"] == "web"
    ended = called("gateway", "keys", "create", str(made.file), "--tenant", "acme", "--app", "none")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "it has: jobs, web" in ended.stderr
    config = yaml.safe_load(made.file.read_text())
    del config["tenants"]["acme"]["apps"]["web"]
    made.file.write_text(yaml.safe_dump(config))
    made.process.send_signal(signal.SIGHUP)
    made.wait(lambda: made.chat(web).status_code == 403)
    assert "app web is not in the gateway's configuration" in message(made, web)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model_limits: {x: {concurrency: 1}}", "gateway.yaml:4: model_limits.x: .*x is no model"),
        ("model_limits: {a: {models: [a]}}", "gateway.yaml:4: model_limits.a.models"),
        (
            "tenants: {t: {apps: {w: {limits: {models: [x]}}}}}",
            "gateway.yaml:4: tenants.t.apps.w.limits.models",
        ),
        ("tenants: {t: {model_limits: {x: {}}}}", "gateway.yaml:4: tenants.t.model_limits.x"),
        ("tenants: {t: {weight: 0}}", "gateway.yaml:4: tenants.t.weight"),
    ],
)
def test_mistakes_are_said_with_their_line(tmp_path: Path, change: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        f"upstreams:\n  u:\n    {{url: 'http://127.0.0.1:1/v1', models: {{a: {{}}}}}}\n{change}\n"
    )
    with pytest.raises(ConfigError, match=said):
        read_config(path)
