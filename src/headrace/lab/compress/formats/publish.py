"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ConfigError


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A draft beside ``folder``, hidden, that is synced to disk and renamed to it when the block ends well.

    Raises ConfigError if something is there already; OSError if it cannot be written (a full disk). Whatever
    goes wrong, nothing is left.
    """
    refuse_existing(folder)
    draft: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        draft.chmod(0o755)
        yield draft
        for path in sorted(draft.iterdir()):
            _sync(path)
        _sync(draft)
        if folder.is_dir():
            folder.rmdir()  # it is empty
        draft.rename(folder)
        _sync(folder.parent)
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def refuse_existing(folder: Path) -> None:
    """Raise ConfigError unless ``folder`` can come into being: there is nothing, or an empty folder."""
    try:
        if folder.is_dir() and not any(folder.iterdir()):
            return
        exists = folder.exists() or folder.is_symlink()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be looked at: {error.strerror or error}.") from None
    if exists:
        raise ConfigError(f"{folder} exists: remove it first, or choose another name.")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
