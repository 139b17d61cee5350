"""The ledger as a file: CSV, JSON Lines or Parquet, row by row."""

from __future__ import annotations

import csv
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.errors import ConfigError, StateError
from headrace.gateway.ledger import Entry

if TYPE_CHECKING:
    from headrace.gateway.store import Store

_BATCH = 10_000  # rows in memory, and in a row group of Parquet's
_TYPES = {"float": "float64", "float | None": "float64", "int": "int64", "bool": "bool_"}

Row = tuple[Any, ...]


async def export(store: Store, path: Path, *, since: float = 0.0, tenant: str | None = None) -> int:
    """Write the rows from ``since`` (seconds since 1970) on, oldest first, and return how many.

    The ending says as what. Raises ConfigError if it is unknown, or the ledger or a library is missing.
    """
    writers: dict[str, Callable[[Path, Iterator[Row]], int]] = {
        ".csv": _csv,
        ".jsonl": _json_lines,
        ".parquet": _parquet,
    }
    writer = writers.get(path.suffix.lower())
    if writer is None:
        raise ConfigError(f"{path}: end the name in {', '.join(writers)}, which says what to write")
    names = ", ".join(field.name for field in fields(Entry))
    where, values = "ended_at >= ?", [since, *([tenant] if tenant is not None else [])]
    if tenant is not None:
        where += " AND tenant = ?"
    try:
        async with store.ledger(since) as db:
            return writer(path, db.execute(f"SELECT {names} FROM ledger WHERE {where} ORDER BY id", values))
    except (sqlite3.Error, StateError) as error:
        raise ConfigError(f"the ledger in {store.where} cannot be read: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """A new file, gone again if what is written to it is not all there."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _csv(path: Path, rows: Iterator[Row]) -> int:
    count = 0
    with _opened(path) as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Entry))
        for row in rows:
            count += 1
            writer.writerow(map(_harmless, row))
    return count


def _harmless(value: object) -> object:
    """Spreadsheets would compute what begins like a formula, and clients choose some of what is kept."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _json_lines(path: Path, rows: Iterator[Row]) -> int:
    names = [field.name for field in fields(Entry)]
    count = 0
    with _opened(path) as file:
        for row in rows:
            count += 1
            file.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")
    return count


def _parquet(path: Path, rows: Iterator[Row]) -> int:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install pyarrow, or write .csv or .jsonl") from None
    schema = pyarrow.schema(
        [(field.name, getattr(pyarrow, _TYPES.get(str(field.type), "string"))()) for field in fields(Entry)]
    )
    count = 0
    try:
        with ParquetWriter(path, schema) as writer:
            while batch := list(itertools.islice(rows, _BATCH)):
                count += len(batch)
                columns = [
                    pyarrow.array(column, kind.type)
                    if not pyarrow.types.is_boolean(kind.type)
                    else pyarrow.array(map(bool, column), kind.type)
                    for column, kind in zip(zip(*batch, strict=True), schema, strict=True)
                ]
                writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return count
