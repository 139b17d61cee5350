"""Typed access to the keys of a parsed ``config.json`` or its like: every complaint names file and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelFormatError
from headrace.model.architecture import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
"""Hugging Face names of the activations that there are."""


class Keys:
    """A JSON object whose values are checked as they are read.

    A key that is absent or ``null`` takes the caller's default; without one it is required. All methods
    raise ModelFormatError.
    """

    def __init__(self, values: object, path: str = "", *, file: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            name = f"'{path[:-1]}'" if path else "the whole"
            raise ModelFormatError(f"{file}: {name} must be a JSON object, not {_show(values)}.")
        self._values: Mapping[str, Any] = values
        self._path = path
        self._file = file

    def has(self, key: str) -> bool:
        """Whether the key is there and not ``null``."""
        return self._values.get(key) is not None

    def holds(self, key: str) -> bool:
        """Whether the key is there at all, ``null`` included."""
        return key in self._values

    def names(self) -> list[str]:
        """The keys that there are."""
        return [str(name) for name in self._values]

    def wrong(self, key: str, problem: str) -> ModelFormatError:
        """An error about ``key`` for the caller to raise."""
        return ModelFormatError(f"{self._file}: '{self._path}{key}' {problem}.")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer within ``low..high``."""
        value = self._get(key, default)
        # Some exporters write whole numbers as 4096.0.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"must be an integer from {low} to {high}, not {_show(value)}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = math.inf
    ) -> float:
        """A finite number above ``low`` and at most ``high``."""
        value = self._get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low < value <= high
        # An integer may be too large for a float: compare before converting.
        if not good or value > 1e300:
            bounds = f"above {low:g}" + (f", at most {high:g}" if high < math.inf else "")
            raise self.wrong(key, f"must be a finite number {bounds}, not {_show(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {_show(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"must be a string, not {_show(value)}")
        return value

    def texts(self, key: str, count: int) -> list[str]:
        """A list of exactly ``count`` strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, f"must be a list of strings, not {_show(value)}")
        if len(value) != count:
            raise self.wrong(key, f"must have {count} entries, one per layer, not {len(value)}")
        return value

    def section(self, key: str) -> Keys:
        """The object under ``key``."""
        return Keys(self._get(key, None), f"{self._path}{key}.", file=self._file)

    def _get(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(key, "is missing")
        return value


def _show(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of over 4300 digits
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
