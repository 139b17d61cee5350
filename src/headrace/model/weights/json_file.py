"""The JSON files that lie beside weights: read within bounds, refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelFormatError

_MAX_BYTES = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ModelFormatError if it cannot be read, or holds none."""
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name} must be a JSON object.")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The list in a file. Raises ModelFormatError if it cannot be read, or holds none."""
    value = _read(path)
    if not isinstance(value, list):
        raise ModelFormatError(f"{path.name} must be a JSON list.")
    return value


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFormatError(f"{path.name} is over {_MAX_BYTES} bytes: not a description of a model.")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFormatError(
            f"{path.parent.name} has no readable {path.name}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path.name} is not valid JSON: {error}.") from None
