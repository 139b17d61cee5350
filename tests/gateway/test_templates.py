"""Prompts by name: stored, versioned, filled in by requests, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from tests import http
from tests.e2e.running import called
from tests.gateway.running import RunningGateway, Upstreams, free_port, gateway
from tests.gateway.test_admin import ENV, KEY
from tests.lab.streaming_server import Streamer

SUPPORT = {
    "messages": [
        {"role": "system", "content": "You answer for {{ company }}. Be {{tone}}."},
        {"role": "user", "content": "{{question}}"},
    ],
    "variables": {
        "company": {"default": "Mill & Co"},
        "tone": {"choices": ["brief", "kind"]},
        "question": {"max_chars": 40},
    },
}
Made = tuple[RunningGateway, Streamer, dict[str, str], dict[str, str], int]


@pytest.fixture(scope="module")
def made(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    streamer, url = upstreams.start()
    port = free_port()
    config = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": {}, "other": {}},
        "templates": {
            "support": SUPPORT,
            "ours": {
                "messages": [{"role": "user", "content": "{{x}}"}],
                "variables": {"x": {}},
                "tenants": ["acme"],
            },
            "many": {"messages": [{"role": "user", "content": "{{x}}" * 9000}], "variables": {"x": {}}},
            "line": {"text": "Q: {{q}}\nA:", "variables": {"q": {}}},
        },
        "max_body_mib": 1,
        "admin": {"key_env": "ADMIN_KEY", "port": port},
    }
    with gateway(config, tmp_path_factory.mktemp("gateway"), ENV) as running:
        yield running, streamer, running.key("acme"), running.key("other"), port


def ask(
    made: Made, prompt: Any, key: dict[str, str] | None = None, path: str = "chat/completions", **body: Any
) -> httpx.Response:
    running, _, acme, _, _ = made
    asked = {"model": "m", "max_tokens": 3, "prompt": prompt, **body}
    return running.client.post(f"/v1/{path}", json=asked, headers=key or acme)


def test_the_upstream_sees_messages(made: Made) -> None:
    _, streamer, _, _, _ = made
    values = {"tone": "kind", "question": "why {{company}} {{tone}}?"}
    answer = ask(
        made,
        {"id": "support", "variables": values},
        messages=[{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "{{tone}}"}],
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headrace-template"] == "support@1"
    body = streamer.asked[-1].body
    assert "prompt" not in body
    assert body["messages"] == [
        {"role": "system", "content": "You answer for Mill & Co. Be kind."},
        {"role": "user", "content": "why {{company}} {{tone}}?"},  # a value is no template
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "{{tone}}"},
    ]


def test_completions_have_theirs(made: Made) -> None:
    _, streamer, _, _, _ = made
    answer = ask(made, {"id": "line", "variables": {"q": "2+2?"}}, path="completions")
    assert answer.status_code == 200, answer.text
    assert streamer.asked[-1].body["prompt"] == "Q: 2+2?\nA:"


def test_equal_prompts_are_equal_to_the_cache(made: Made) -> None:
    running, _, key, _, _ = made
    plain = [
        {"role": "system", "content": "You answer for Mill & Co. Be brief."},
        {"role": "user", "content": "equal?"},
    ]
    first = running.chat(key, temperature=0, messages=plain)
    filled = ask(made, {"id": "support", "variables": {"tone": "brief", "question": "equal?"}}, temperature=0)
    assert (first.headers["x-headrace-cache"], filled.headers["x-headrace-cache"]) == ("miss", "hit")


@pytest.mark.parametrize(
    ("prompt", "status", "said"),
    [
        ({"id": "nothing"}, 404, "no template `nothing`"),
        ({"id": "support", "version": 7, "variables": {}}, 404, "version 7"),
        ({"id": "support", "version": "x"}, 400, "version"),
        ({"id": "support", "version": 0}, 400, "version"),
        ({"id": "support", "version": True}, 400, "version"),
        ({"id": 3}, 400, "`id`"),
        ({}, 400, "`id`"),
        ({"id": "support", "values": {}}, 400, "`values`"),
        ({"id": "support", "variables": []}, 400, "`variables`"),
        ({"id": "support", "variables": {"tone": "kind"}}, 400, "`question` is missing"),
        ({"id": "support", "variables": {"tone": "rude", "question": "?"}}, 400, "brief, kind"),
        ({"id": "support", "variables": {"tone": "kind", "question": "?" * 41}}, 400, "may have 40"),
        ({"id": "support", "variables": {"tone": "kind", "question": 1}}, 400, "must be a string"),
        ({"id": "support", "variables": {"tune": "kind"}}, 400, "no variable `tune`"),
        ({"id": "line", "variables": {"q": "?"}}, 400, "for completions"),
    ],
)
def test_what_does_not_fit_is_refused(made: Made, prompt: Any, status: int, said: str) -> None:
    _, streamer, _, _, _ = made
    asked = len(streamer.asked)
    refused = ask(made, prompt)
    assert refused.status_code == status, refused.text
    assert said in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "prompt"
    assert len(streamer.asked) == asked


def test_a_template_may_be_for_some(made: Made) -> None:
    _, _, _, other, _ = made
    prompt = {"id": "ours", "variables": {"x": "?"}}
    assert ask(made, prompt).status_code == 200
    assert ask(made, prompt, other).status_code == 404


def test_what_would_grow_too_large_is_not_made(made: Made) -> None:
    refused = ask(made, {"id": "many", "variables": {"x": "y" * 20_000}})
    assert refused.status_code == 400
    assert "over 1048576 bytes" in refused.json()["error"]["message"]


def test_commands_store_versions_that_requests_name(made: Made) -> None:
    running, streamer, _, _, _ = made
    file, config = running.file.parent / "greet.yaml", str(running.file)
    for version, text in ((1, "Hello {{who}}"), (2, "Good day {{who}}")):
        content = {"messages": [{"role": "user", "content": text}], "variables": {"who": {}}}
        file.write_text(yaml.safe_dump(content))
        assert (
            called("gateway", "templates", "put", config, "greet", str(file)).stdout == f"greet@{version}\n"
        )
    for version, text in ((None, "Good day you"), ("1", "Hello you"), (2, "Good day you")):
        prompt = {"id": "greet", "variables": {"who": "you"}}
        answer = ask(made, prompt | ({} if version is None else {"version": version}))
        assert answer.status_code == 200
        assert streamer.asked[-1].body["messages"] == [{"role": "user", "content": text}]
    listed = called("gateway", "templates", "list", config).stdout
    [line] = [line for line in listed.splitlines() if line.startswith("greet")]
    assert line.split()[-2:] == ["56%", "who"]
    shown = json.loads(called("gateway", "templates", "show", config, "greet", "--version", "1").stdout)
    assert shown == {"messages": [{"role": "user", "content": "Hello {{who}}"}], "variables": {"who": {}}}
    rendered = called("gateway", "templates", "render", config, "greet", "--set", "who=a=b").stdout
    assert json.loads(rendered) == {"messages": [{"role": "user", "content": "Good day a=b"}]}
    for wrong, said in (
        (["render", config, "greet"], "`who` is missing"),
        (["put", config, "-", str(file)], "begins with a letter"),
    ):
        failed = called("gateway", "templates", *wrong)
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert said in failed.stderr
    assert called("gateway", "templates", "remove", config, "greet").stdout == "forgot 2 versions of greet\n"
    assert ask(made, {"id": "greet", "variables": {"who": "you"}}).status_code == 404


def test_the_admin_api_does_the_same(made: Made) -> None:
    _, _, _, _, port = made
    content = {"text": "{{a}} and {{b}}", "variables": {"a": {}, "b": {"default": "b"}}}
    headers = {"authorization": f"Bearer {KEY}"}
    with http.client(f"http://127.0.0.1:{port}", headers) as admin:
        put = admin.put("/templates/team/two", json=content)
        assert put.json()["version"] == 1, put.text
        assert put.json()["kind"] == "completion"
        assert admin.put("/templates/team/two", json=content).json()["version"] == 1
        assert admin.get("/templates/team/two").json()["template"] == content
        assert "team/two" in [row["name"] for row in admin.get("/templates").json()]
        answer = ask(made, {"id": "team/two", "variables": {"a": "a"}}, path="completions")
        assert answer.headers["x-headrace-template"] == "team/two@1"
        for wrong, said in (
            ({"text": "{{a}}"}, "not among the variables"),
            ({"text": "a", "variables": {"a": {}}}, "nowhere in the text"),
            ({"text": "a", "messages": content}, ""),
            ({}, "either messages or text"),
            ({"text": "{{a}}", "variables": {"a": {"default": "x", "choices": ["y"]}}}, "default"),
        ):
            refused = admin.put("/templates/team/two", json=wrong)
            assert refused.status_code == 400, refused.text
            assert said in refused.json()["error"]["message"]
        assert admin.delete("/templates/team/two").json() == {"versions": 1}
        assert admin.get("/templates/team/two").status_code == 404


def test_a_changed_file_is_a_new_version(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "authentication": "none",
        "templates": {"hi": {"messages": [{"role": "user", "content": "hi"}]}},
    }
    for text, version in (("hi", 1), ("hello", 2)):
        config["templates"]["hi"]["messages"][0]["content"] = text
        file = tmp_path / "gateway.yaml"
        file.write_text(yaml.safe_dump(config))
        [row] = json.loads(called("gateway", "templates", "list", str(file), "--json").stdout)
        assert row["version"] == version
    config["templates"]["hi"]["messages"][0]["content"] = "{{who}}"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    with pytest.raises(ConfigError, match=r"templates\.hi: .*\{\{who\}\} is in the text"):
        read_config(file)
