"""Which linear weights a step of a recipe is for: words, or names with wildcards."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import ConfigError
from headrace.yaml_file import nearest

LINEARS = "linears"
HEAD = "head"
_ATTENTION, _FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")
_WORDS = {
    LINEARS: "layers.*",
    "attention": "layers.*.attention.*",
    "feed_forward": "layers.*.feed_forward.*",
    **{part: f"layers.*.attention.{part}" for part in _ATTENTION},
    **{part: f"layers.*.feed_forward.{part}" for part in _FEED_FORWARD},
    HEAD: HEAD,
}
"""Short names of targets, and the patterns that they stand for."""


class Targeted(BaseModel):
    """A step that is for some of the linear weights."""

    model_config = ConfigDict(extra="forbid")

    targets: list[str] = Field(default=[LINEARS], min_length=1)
    ignore: list[str] = []

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that the step is for. Raises ConfigError for a pattern that is for none."""
        ignored = set(matching(self.ignore, names))
        return [name for name in matching(self.targets, names) if name not in ignored]


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The names that any pattern is for, in their own order.

    A pattern is a word (``linears``, ``attention``, ``down``, ``head`` …) or has wildcards, as
    ``layers.0.*``. Raises ConfigError for a pattern that fits no name, with the nearest one.
    """
    found: set[str] = set()
    for pattern in patterns:
        these = fnmatch.filter(names, _WORDS.get(pattern, pattern))
        if not these and pattern != HEAD:
            raise ConfigError(
                f"No linear weight is called {pattern!r}: targets are {', '.join(_WORDS)}, or names such as "
                f"{names[0]} with wildcards{nearest(pattern, [*_WORDS, *names])}"
            )
        found.update(these)
    return [name for name in names if name in found]
