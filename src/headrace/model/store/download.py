"""One file from a URL to the disk: resumed where a killed try stopped, verified, within the free space."""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headrace.errors import DownloadError
from headrace.model.store.http import TRANSIENT, TRIES, Client, is_final, pause, redacted
from headrace.model.store.index import Link
from headrace.model.store.progress import Progress


class DiskFullError(DownloadError):
    """The disk has no room; what was fetched is kept."""


CHUNK = 2**20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def fetch(link: Link, target: Path, client: Client, progress: Progress | None = None) -> Path:
    """Fetch ``link`` to ``target``, which must not exist; ``target`` + ``.part`` holds what came so far.

    The caller holds the lock on ``target``. Raises DownloadError: the network failed TRIES times without a
    byte of progress or the server said no (what came is kept and the next call goes on from there), the disk
    is full (likewise), or the hash differs (the file is removed).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures = 0
    while True:
        before = _size(part)
        try:
            with disk_full(target.parent, lambda: _missing(link, part)):
                _transfer(link, part, client, progress)
            break
        except TRANSIENT as error:
            failures = 1 if _size(part) > before else failures + 1
            if is_final(error) or failures >= TRIES:
                reason = getattr(error, "reason", None) or error
                code = f"HTTP {error.code} " if hasattr(error, "code") else ""
                raise DownloadError(
                    f"Could not fetch {redacted(link.url)}: {code}{reason}. Pulling again goes on after the "
                    f"{_size(part)} bytes that are here."
                ) from error
            pause(failures)
    _verify(link, part)
    part.replace(target)
    return target


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise DiskFullError if the disk under ``folder`` has less than ``needed_bytes`` free."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise DiskFullError(
            f"Not enough disk space for {what}: {megabytes(needed_bytes)} are needed in {folder}, "
            f"{megabytes(free)} are free. Free some, or set HEADRACE_CACHE to a larger disk."
        )


@contextmanager
def disk_full(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn the system's 'no space left' into a DiskFullError saying how much ``folder`` still needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(
            f"The disk is full ({error.strerror}): about {megabytes(needed())} more are needed in {folder}. "
            "What has come is kept: free some space, or set HEADRACE_CACHE to a larger disk, and pull again."
        ) from error


def megabytes(size_bytes: int) -> str:
    """A size for people, in units of 10**6 bytes, rounded up."""
    return f"{-(-size_bytes // 10**6)} MB"


def _transfer(link: Link, part: Path, client: Client, progress: Progress | None) -> None:
    have = _size(part)
    if link.size_bytes is not None and have >= link.size_bytes:
        return  # the bytes are all here, the hash decides
    with client.open(link.url, {"Range": f"bytes={have}-"} if have else None) as response:
        have, total = _position(response, have, link)
        if total:
            require_space(part.parent, total - have, link.filename)
        with part.open("r+b" if part.exists() else "wb") as file:
            file.truncate(have)
            file.seek(have)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if total and have > total:
                    raise DownloadError(f"{redacted(link.url)} is longer than the {total} bytes announced")
                if progress is not None:
                    progress(link.filename, have, total)
    if total and have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def _position(response: IO[bytes], have: int, link: Link) -> tuple[int, int]:
    """Where the response's first byte belongs, and the size of the whole file (0 = unknown)."""
    headers = response.headers  # type: ignore[attr-defined]
    status = getattr(response, "status", None)
    length = headers.get("Content-Length", "")
    body = int(length) if length.isdecimal() else 0
    if have and status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
        if match is None or int(match[1]) != have:
            raise DownloadError(
                f"{redacted(link.url)}: asked for bytes from {have} on, the server sent "
                f"{headers.get('Content-Range')!r}"
            )
        total = int(match[2]) if match[2] != "*" else (have + body if body else 0)
    else:  # a server that knows no ranges sends the whole file
        have, total = 0, body
    return have, link.size_bytes or total


def _verify(link: Link, part: Path) -> None:
    if link.size_bytes is not None and _size(part) != link.size_bytes:
        found = _size(part)
        part.unlink()
        raise DownloadError(
            f"{link.filename} has {found} bytes, the index says {link.size_bytes}; it was removed"
        )
    if link.sha256 is None:
        return
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != link.sha256:
        part.unlink()
        raise DownloadError(
            f"{link.filename} is not what the index promised (sha256 {digest}, expected {link.sha256}); it "
            "was removed. Pull again; if this repeats, the mirror or a proxy changes files."
        )


def _missing(link: Link, part: Path) -> int:
    return max((link.size_bytes or 0) - _size(part), 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
