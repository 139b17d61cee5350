"""headrace serve --config: what a file may say, and how its mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.config_file import options_of, read_options
from headrace.cli.main import app
from headrace.cli.serve import serve
from headrace.errors import ConfigError
from tests import http
from tests.e2e.running import run, serving


def options(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return read_options(path, serve, "headrace serve")


def test_names_have_dashes_or_underscores_and_values_their_plain_form(tmp_path: Path) -> None:
    found = options(
        tmp_path,
        "# of our shop\nmodel: smollm2-135m\nmax_num_seqs: 4\nmax-queue-time: 3\nkv-cache-memory: 1048576\n"
        "no-prefix-caching: true\nengine-thread: false\nserved-model-name: shop\nseed:\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 4}\n",
    )
    assert found == {
        "model": "smollm2-135m",
        "max_num_seqs": 4,
        "max_queue_time": 3,
        "kv_cache_memory": "1048576",
        "prefix_caching": False,
        "engine_process": True,
        "served_model_name": ["shop"],
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
    }


def test_every_option_but_the_file_itself_can_be_in_it(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).stdout
    for name in options_of(serve):
        assert f"--{name}" in listed or name == "model"
    with pytest.raises(ConfigError, match="config is not an option"):
        options(tmp_path, "config: other.yaml\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: x\n\nmax-num-seq: 3", r"line 3: max-num-seq is not an option .*did you mean max-num-seqs\?"),
        ("zzz: 3", "line 1: zzz is not an option of headrace serve; `headrace serve --help`"),
        ("port: 70000", "line 1: port: .*65535.*70000"),
        ("host: x\nport: eighty", "line 2: port: .*integer.*'eighty'"),
        ("threads: true", "line 1: threads: .*integer"),
        ("threads: 1.5", "line 1: threads"),
        ("prefix-caching: 3", "line 1: prefix-caching: .*boolean"),
        ("no-prefix-caching: 3", "no-prefix-caching is true or false"),
        ("quantization: int9", "line 1: quantization: .*int8.*int4"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "line 2: max-num-seqs is given already in line 1"),
        ("max-body-size: lots", "line 1: max-body-size: 'lots' is not a size"),
        ("model: x\nspeculative-config: {method: magic}", "line 2: .*ngram"),
        ("speculative-config: [1]", "line 1: .*method"),
        ("[1, 2]", "no list of options"),
        ("", "is empty"),
        ("port: 'x", "is not YAML"),
        ("port: !!python/object:os.system x", "is not YAML"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        options(tmp_path, text)
    assert "\n" not in raised.value.message


def test_a_missing_file_is_named() -> None:
    done = run("serve", "--config", "missing.yaml")
    assert done.returncode == 1
    assert done.stderr == "headrace: missing.yaml cannot be read: No such file or directory.\n"


def test_a_server_starts_as_its_file_says_and_the_command_line_wins(
    minilm_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: minilm-l6\nserved_model_name: [first, second]\napi-key: secret\nport: 1\n")
    with serving("--config", str(path), "--api-key", "other") as server:  # and --port 0
        models = http.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer other"}).json()
        refused = http.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret"})
    assert [card["id"] for card in models["data"]] == ["first", "second"]
    assert refused.status_code == 401
