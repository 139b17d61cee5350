"""Pulling from a Hugging Face hub: a small real server that speaks the parts of its API that are needed.

huggingface_hub reads its settings when it is imported, so every pull runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.model.store.hub import choose
from headrace.model.store.reference import HubReference
from tests.model.store_servers import HubServer, running

WEIGHTS = bytes(range(256)) * 1024
COMMIT = "1234567890" * 4
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "README.md": b"words",
    "onnx/model.onnx": b"no",
    "original/params.json": b"{}",
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    state = HubServer(repos={"org/name": dict(FILES)}, commits={"org/name": COMMIT})
    with running(state):
        yield state


@pytest.fixture
def call(hub: HubServer, tmp_path: Path) -> Run:
    """Run ``store.<name>(argument)`` in a new process; prints the result, or the error and its class."""
    code = (
        "import json, sys\n"
        "from headrace.errors import HeadraceError\n"
        "from headrace.model import store\n"
        "calls = []\n"
        "takes_progress = sys.argv[1] in ('pull', 'resolve')\n"
        "keywords = {'progress': lambda *call: calls.append(list(call))} if takes_progress else {}\n"
        "try:\n"
        "    print(getattr(store, sys.argv[1])(*sys.argv[2:], **keywords))\n"
        "    print(json.dumps(calls[-1:]))\n"
        "    print('huggingface_hub' in sys.modules)\n"
        "except HeadraceError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HEADRACE_"))}
    own = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HEADRACE_CACHE": str(tmp_path / "cache"),
        "NO_PROXY": "*",
    }

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=keep | own | environment,
            timeout=60,
        )

    return run


def test_pull_resolve_list_remove(hub: HubServer, call: Run, tmp_path: Path) -> None:
    first = call("pull", "org/name")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.splitlines()[0])
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.name == COMMIT
    assert folder.is_relative_to(tmp_path / "hf")
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json"]

    hub.seen.clear()
    again = call("resolve", "hf:org/name").stdout.splitlines()
    assert again == [str(folder), "[]", "False"]
    assert not hub.seen

    listed = call("list_models").stdout
    assert "reference='hf:org/name'" in listed
    assert str(folder) in listed

    removed = call("remove", "org/name")
    assert "hf:org/name" in removed.stdout, removed.stderr
    assert not (folder / "model.safetensors").exists()
    assert "ModelNotFoundError" in call("remove", "org/name").stderr


def test_a_configuration_comes_without_weights(hub: HubServer, call: Run) -> None:
    first = call("configuration", "org/name")
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.splitlines()[0]).read_bytes() == b"{}"
    assert hub.fetched() == ["config.json"]
    hub.repos["org/name"] = {"model.gguf": WEIGHTS}
    hub.commits["org/name"] = COMMIT[::-1]
    assert call("configuration", "org/name").stdout.splitlines()[0] == "None"
    assert call("configuration", "hf:org/name/model.gguf").stdout.splitlines()[0] == "None"


def test_progress_counts_bytes(call: Run) -> None:
    run = call("pull", "org/name")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[1]) == [["tokenizer.json", 3, 3]]
    assert "%" not in run.stderr


def test_pull_follows_a_branch_that_moved_and_resolve_does_not(hub: HubServer, call: Run) -> None:
    old = call("pull", "org/name").stdout.splitlines()[0]
    hub.commits["org/name"] = "f" * 40
    hub.repos["org/name"]["model.safetensors"] = WEIGHTS[::-1]
    assert call("resolve", "org/name").stdout.splitlines()[0] == old
    new = call("pull", "org/name").stdout.splitlines()[0]
    assert new != old
    assert (Path(new) / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert call("resolve", "org/name").stdout.splitlines()[0] == new


def test_a_revision_can_be_named(call: Run) -> None:
    assert call("resolve", f"org/name@{COMMIT}").returncode == 0
    missing = call("resolve", "org/name@v9")
    assert "ModelNotFoundError" in missing.stderr
    assert "no revision v9" in missing.stderr


def test_a_download_cut_short_goes_on_where_it_stopped(hub: HubServer, call: Run) -> None:
    # huggingface_hub writes whole chunks of 10 MiB.
    hub.repos["org/name"] = {"model.safetensors": bytes(24 * 2**20)}
    hub.cut_after = 22 * 2**20
    run = call("pull", "org/name")
    assert run.returncode == 0, run.stderr
    assert (Path(run.stdout.splitlines()[0]) / "model.safetensors").stat().st_size == 24 * 2**20
    ranges = [seen.range for seen in hub.seen if seen.path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={20 * 2**20}-"]


def test_contents_that_differ_from_the_hubs_hash_are_removed(
    hub: HubServer, call: Run, tmp_path: Path
) -> None:
    hub.corrupt.add("model.safetensors")
    run = call("pull", "org/name")
    assert "DownloadError" in run.stderr
    assert "sha256" in run.stderr
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    hub.corrupt.clear()
    again = call("pull", "org/name")
    assert (Path(again.stdout.splitlines()[0]) / "model.safetensors").read_bytes() == WEIGHTS


def test_token_and_missing_repositories(hub: HubServer, call: Run) -> None:
    hub.token = "hf_secret"
    refused = call("pull", "org/name")
    assert "ModelNotFoundError" in refused.stderr
    assert "HF_TOKEN" in refused.stderr
    assert call("pull", "org/name", HF_TOKEN="hf_secret").returncode == 0
    assert "ModelNotFoundError" in call("pull", "org/other", HF_TOKEN="hf_secret").stderr


def test_an_endpoint_that_is_down(call: Run) -> None:
    run = call("pull", "org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert run.stderr.startswith("DownloadError"), run.stderr
    assert "Traceback" not in run.stderr


def test_offline_uses_what_others_have_fetched(hub: HubServer, call: Run, tmp_path: Path) -> None:
    folder = call("pull", "org/name").stdout.splitlines()[0]
    other_store = {"HEADRACE_CACHE": str(tmp_path / "other")}
    hub.seen.clear()
    assert call("resolve", "org/name", HEADRACE_OFFLINE="1", **other_store).stdout.splitlines()[0] == folder
    assert "DownloadError" in call("resolve", "org/new", HEADRACE_OFFLINE="1", **other_store).stderr
    assert not hub.seen


def test_a_gguf_repository(hub: HubServer, call: Run) -> None:
    hub.repos["org/name"] = {"a-Q8_0.gguf": b"GGUF8", "a-Q4_K_M.gguf": b"GGUF4", "config.json": b"{}"}
    path = Path(call("pull", "org/name").stdout.splitlines()[0])
    assert (path.name, path.read_bytes()) == ("a-Q4_K_M.gguf", b"GGUF4")
    path = Path(call("pull", "hf:org/name/a-Q8_0.gguf").stdout.splitlines()[0])
    assert (path.name, path.read_bytes()) == ("a-Q8_0.gguf", b"GGUF8")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "a.gguf", "config.json"], ["model.safetensors", "config.json"]),
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["x/y.gguf"], ["x/y.gguf"]),
        (["model.safetensors", "../../evil.json", "/etc/x.json"], ["model.safetensors"]),
        (
            ["model.safetensors", "1_Pooling/config.json", "sub/config.json", "chat_template.jinja"],
            ["model.safetensors", "1_Pooling/config.json", "chat_template.jinja"],
        ),
    ],
)
def test_which_files_are_chosen(names: list[str], expected: list[str]) -> None:
    assert choose(names, HubReference("o/n")) == expected


def test_what_cannot_be_chosen() -> None:
    with pytest.raises(ModelFormatError, match="pickles only"):
        choose(["pytorch_model.bin", "config.json"], HubReference("o/n"))
    with pytest.raises(ModelNotFoundError, match="holds no"):
        choose(["README.md"], HubReference("o/n"))
    with pytest.raises(ModelNotFoundError, match=r"hf:o/n/a\.gguf"):
        choose(["b.gguf", "a.gguf"], HubReference("o/n"))
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf"):
        choose(["a.gguf"], HubReference("o/n", file="c.gguf"))
