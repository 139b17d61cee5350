"""The gateway's file and its commands: what is wrong is said in one line, with the line of the mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.gateway.config import read_config
from tests.e2e.running import called, run

GOOD = """
upstreams:
  a:
    url: http://127.0.0.1:1/v1
    models: {m: {price: {input: 1.5}}}
tenants:
  acme:
    limits: {concurrency: 2}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("models: {m:", "models: {m", "is not YAML"),
        ("concurrency: 2", "concurrency: 0", "gateway.yaml:8: tenants.acme.limits.concurrency"),
        ("concurrency: 2", "concurency: 2", "gateway.yaml:8: tenants.acme.limits.concurency"),
        ("input: 1.5", "input: -1", "gateway.yaml:5: upstreams.a.models.m.price.input"),
        ("http://127.0.0.1:1/v1", "file:///etc/passwd", "http://127.0.0.1:8001/v1"),
        ("http://127.0.0.1:1/v1", "http://me:secret@127.0.0.1/v1", "api_key_env"),
        ("tenants:", "aliases: {x: none}\ntenants:", "x stands for none, which no upstream has"),
        ("concurrency: 2", "models: [other]", "acme may use other, which no upstream has"),
        (
            "tenants:",
            "cache: {semantic: {}}\ntenants:",
            "gateway.yaml:6: cache.semantic: Value error, it needs",
        ),
        (
            "tenants:",
            "embeddings: {model: e}\ntenants:",
            "gateway.yaml:6: embeddings.model: Value error, e is no",
        ),
        ("    url:", "    kind: magic\n    url:", "gateway.yaml:4: upstreams.a.kind"),
        ("    url:", "    credential_env: X\n    url:", "for upstreams of kind headrace"),
    ],
)
def test_a_mistake_is_said_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert said in error.value.message
    assert "secret@" not in error.value.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("concurrency: 2", "concurency: 2", "gateway.yaml:8: tenants.acme.limits.concurency"),
        ("    url:", "    api_key_env: HEADRACE_NO_SUCH_KEY\n    url:", "HEADRACE_NO_SUCH_KEY must be set"),
    ],
)
def test_the_command_ends_with_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD.replace(old, new))
    ended = run("gateway", "run", str(path), "--port", "0")
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    ended = called("gateway", "usage", str(tmp_path / "none.yaml"))
    assert ended.returncode == 1
    assert "cannot be read" in ended.stderr


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    made = called("gateway", "keys", "create", str(path), "--tenant", "acme", "--name", "laptop")
    secret = made.stdout.strip()
    assert secret.startswith("hr-")
    assert secret not in made.stderr
    [key] = json.loads(called("gateway", "keys", "list", str(path), "--json").stdout)
    assert (key["tenant"], key["name"], key["revoked_at"]) == ("acme", "laptop", None)
    assert called("gateway", "keys", "rotate", str(path), key["id"]).stdout.strip() != secret
    assert called("gateway", "keys", "revoke", str(path), key["id"]).returncode == 0
    again = called("gateway", "keys", "revoke", str(path), key["id"])
    assert again.returncode == 1
    assert key["id"] in again.stderr
    stored = b"".join(file.read_bytes() for file in (tmp_path / "gateway-state").iterdir())
    assert secret.encode() not in stored
    nobody = called("gateway", "keys", "create", str(path), "--tenant", "nobody")
    assert nobody.returncode == 1
    assert "it has: acme" in nobody.stderr


def test_the_example_is_right() -> None:
    config = read_config(Path(__file__).parents[2] / "examples" / "gateway.yaml")
    assert config.models == {"smollm2-135m", "gemma3-270m", "external-large", "dependable", "minilm-l6"}
