"""The catalogue: short names for models that need no account to pull."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One named model. ``source`` is ``package==version``, and so is each of ``parts``.

    ``path`` is what a reader opens, relative to the stored folder; ``sha256`` maps weights files to digests.
    """

    alias: str
    title: str
    licence: str
    source: str
    parts: tuple[str, ...]
    path: str
    size_bytes: int
    sha256: Mapping[str, str]


@functools.cache
def catalogue() -> Mapping[str, Entry]:
    """Every entry by alias, in the file's order."""
    with Path(__file__).with_name("catalogue.toml").open("rb") as file:
        tables = tomllib.load(file)
    return {
        alias: Entry(
            alias,
            table["title"],
            table["licence"],
            table["source"],
            tuple(table.get("parts", ())),
            table["path"],
            table["size_bytes"],
            table["sha256"],
        )
        for alias, table in tables.items()
    }


def entry_of(source: str) -> Entry | None:
    """The entry whose wheel ``package==version`` is, if any: it knows the parts and the digests."""
    return next((entry for entry in catalogue().values() if entry.source == source), None)
