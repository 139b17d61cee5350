"""Tokenizers of GGUF files, converted once and kept.

Reading and converting a GGUF vocabulary costs far more than loading its tokenizer.json, so the converted
files are kept in the cache folder under a key of the source file's identity and our conversion's version.
What only a conversion needs is imported there: a start from the cache should cost nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import orjson

from headrace.paths import cache_dir

VERSION = 1
"""Of the conversion: raise it whenever the same GGUF file would give other files."""

_log = logging.getLogger(__name__)


def converted_folder(path: Path) -> Path:
    """Where the converted tokenizer of a GGUF file is kept; the folder may not exist yet."""
    stat = path.stat()
    identity = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {VERSION}"
    return cache_dir() / "tokenizers" / hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


def convert_file(path: Path) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer folder, by name, made from a GGUF file's metadata.

    Raises ModelFormatError if the file is no GGUF file or its tokenizer is broken or not supported.
    """
    from headrace.frontend.gguf_tokenizer import convert
    from headrace.model.weights.gguf import GGUFFile

    converted = convert(GGUFFile(path).metadata)
    return {
        "tokenizer_config.json": _dump(converted.config),
        "generation_config.json": _dump(converted.generation),
        "tokenizer.json": _dump(converted.tokenizer),
    }


def keep(files: dict[str, bytes], folder: Path) -> None:
    """Put files into a folder that appears complete or not at all; replaces what is there.

    A cache that can't be written (full disk, read-only home) costs time, never the model.
    """
    import shutil
    import tempfile

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for name, content in files.items():
                (draft / name).write_bytes(content)
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)  # noqa: PTH104  # fails, harmlessly, if another process was first
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        _log.warning("the converted tokenizer could not be cached in %s: %s", folder, error)


def _dump(value: Any) -> bytes:
    return orjson.dumps(value)
