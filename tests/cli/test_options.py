"""The command line as such: versions, sizes, misuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.cli.options import size_bytes, speculative_config
from headrace.engine.config import SpeculativeConfig
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1.5g", 1_500_000_000),
        ("500 MB", 500_000_000),
        ("64k", 64_000),
        ("4096", 4096),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text, "--x") == size


@pytest.mark.parametrize("text", ["", "lots", "-1MiB", "1e9", "5 parsecs", "1MiBB", "9" * 400])
def test_what_is_no_size_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        size_bytes(text, "--x")


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"headrace {headrace.__version__}\n")


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    for command in ("serve", "chat", "models", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize(
    "arguments", [["serve", "--port", "70000"], ["nonsense"], ["chat", "--max-tokens", "0"]]
)
def test_misuse_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_help_imports_nothing_heavy() -> None:
    """--help and --version must feel instant: what only some commands need is imported by them."""
    code = (
        "import sys, headrace.cli.main;"
        "heavy = {'numpy', 'torch', 'fastapi', 'pydantic', 'uvicorn', 'tokenizers', 'jinja2', 'httpx',"
        " 'huggingface_hub', 'prometheus_client', 'structlog'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout == "[]\n"


def test_speculation_as_json() -> None:
    assert speculative_config(None) is None
    config = speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
    assert config == SpeculativeConfig(num_speculative_tokens=3)


@pytest.mark.parametrize(
    "text", ["", "ngram", "null", "[]", "{}", '{"method": "ngram", "k": 3}', "{'method': 1}"]
)
def test_speculation_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        speculative_config(text)
