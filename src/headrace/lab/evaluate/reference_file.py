"""A reference's log-probabilities on disk, so that a model that is too big or too slow is run once.

A safetensors file of three tensors: ``about`` (UTF-8 JSON bytes: what was scored by what), ``step`` (float32
``[rows]``) and ``codes`` (uint16 ``[rows, vocab]``), where ``log p = -step * code`` and ``step`` is a row's
largest ``-log p / 65535``. An exact KL needs the whole distribution, so every token of the vocabulary is
kept. Sixteen linear bits over a row's range (some 30 nats) are wrong by at most 0.0003 nats, float16 by
0.008; the KL's own error is of second order, below 1e-7. It costs ``2 * vocab`` bytes per scored token.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.backend.batch import Float32
from headrace.errors import ConfigError, ModelFormatError
from headrace.lab.evaluate.divergence import LogProbs, Window
from headrace.lab.evaluate.scoring import log_softmax
from headrace.model.weights.safetensors_file import SafetensorsFile

_CODES = 65535
_CHUNK_CODES = 2**22


class About(BaseModel):
    """What a file holds; all must be equal for it to be used again."""

    model_config = ConfigDict(extra="forbid")

    format: str = "headrace-reference-logits/1"
    tokenizer: str
    tokens: str  # hash of the windows: which tokens, and which of them count
    rows: int
    vocab_size: int
    reference: str  # how the reference was named, and its fingerprint


def about(windows: Sequence[Window], *, tokenizer: str, vocab_size: int, reference: str) -> About:
    """The description of ``reference`` scored on ``windows``."""
    digest = hashlib.blake2b(digest_size=16)
    for window in windows:
        digest.update(f"{window.first} {len(window.token_ids)} ".encode())
        digest.update(np.asarray(window.token_ids, "<i8").tobytes())
    return About(
        tokenizer=tokenizer,
        tokens=digest.hexdigest(),
        rows=sum(window.scored for window in windows),
        vocab_size=vocab_size,
        reference=reference,
    )


class ReferenceFile:
    """A written file, mapped. Scores exactly the windows it was written for, in their order."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFormatError if it is not such a file, OSError if it cannot be read."""
        found = SafetensorsFile(path)
        expected = {"about": "U8", "step": "F32", "codes": "U16"}
        if {name: entry.dtype for name, entry in found.entries.items()} != expected:
            raise ModelFormatError(f"{path.name} does not hold reference logits.")
        entries = found.entries
        raw = np.memmap(path, np.uint8, "r", entries["about"].start, entries["about"].shape)
        try:
            self.about = About.model_validate_json(raw.tobytes())
        except ValidationError as error:
            raise ModelFormatError(f"{path.name} does not hold reference logits: {error}") from None
        rows, vocab = self.about.rows, self.about.vocab_size
        if entries["step"].shape != (rows,) or entries["codes"].shape != (rows, vocab):
            raise ModelFormatError(f"{path.name}: its tensors do not have the {rows} rows that it claims.")
        self._step = np.fromfile(path, "<f4", rows, offset=entries["step"].start)
        if not (np.isfinite(self._step) & (self._step >= 0)).all():
            raise ModelFormatError(f"{path.name} is damaged: its steps are not finite numbers of 0 or more.")
        self._codes = np.memmap(path, "<u2", "r", entries["codes"].start, (rows, vocab))
        self._next = 0

    def require(self, wanted: About, path: Path, *, any_reference: bool) -> None:
        """Raise ConfigError, naming what differs, unless this file is of ``wanted``."""
        ours, theirs = self.about.model_dump(), wanted.model_dump()
        if any_reference:
            theirs["reference"] = ours["reference"]
        differing = [f"{key} is {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key]]
        if differing:
            raise ConfigError(
                f"{path} holds the reference logits of something else: {'; '.join(differing)}. "
                "Name another file, or remove it."
            )

    def log_probs(self, token_ids: Sequence[int], first: int = 1) -> Iterator[Float32]:
        """The next window's rows; normalised again after rounding."""
        stop = self._next + len(token_ids) - first
        step = max(1, _CHUNK_CODES // self.about.vocab_size)
        while self._next < stop:
            rows = slice(self._next, min(self._next + step, stop))
            yield log_softmax(self._codes[rows].astype(np.float32) * -self._step[rows, None])
            self._next = rows.stop


def write(path: Path, described: About, windows: Sequence[Window], reference: LogProbs) -> Iterator[int]:
    """Score the windows and write the file, which appears complete or not at all; yields rows as they come.

    Raises ConfigError if the disk has no room for it.
    """
    with _Writer(path, described) as writer:
        for window in windows:
            for rows in reference.log_probs(window.token_ids, window.first):
                writer.add(rows)
                yield len(rows)


class _Writer:
    def __init__(self, path: Path, described: About) -> None:
        text = described.model_dump_json().encode()
        sizes = [len(text), 4 * described.rows, 2 * described.rows * described.vocab_size]
        shapes = [[len(text)], [described.rows], [described.rows, described.vocab_size]]
        header, offset = {}, 0
        for name, dtype, shape, size in zip(
            ("about", "step", "codes"), ("U8", "F32", "U16"), shapes, sizes, strict=True
        ):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        encoded = json.dumps(header).encode()
        free = shutil.disk_usage(path.absolute().parent).free
        if offset > free:
            raise ConfigError(
                f"The reference logits take {offset / 1e9:.1f} GB, {path.absolute().parent} has "
                f"{free / 1e9:.1f} GB free: score fewer tokens, or name a file on a larger disk."
            )
        self._path, self._unfinished = path, path.with_name(f".{path.name}.{os.getpid()}")
        self._steps_at = 8 + len(encoded) + sizes[0]
        self._steps: list[Float32] = []
        self._file: BinaryIO = self._unfinished.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded + text)
        self._file.seek(self._steps_at + sizes[1])

    def add(self, rows: Float32) -> None:
        step = np.maximum(-rows.min(axis=1) / _CODES, np.finfo(np.float32).tiny).astype("<f4")
        codes = np.rint(rows / -step[:, None])
        self._file.write(np.clip(codes, 0, _CODES).astype("<u2").tobytes())
        self._steps.append(step)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._file.seek(self._steps_at)
                self._file.write(np.concatenate(self._steps).tobytes())
        finally:
            self._file.close()
            if kind is None:
                self._unfinished.replace(self._path)
            else:
                self._unfinished.unlink()
