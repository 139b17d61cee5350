"""Where headrace keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$HEADRACE_CACHE``, else ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``.

    The folder need not exist: whoever writes into it creates it. Everything below may be deleted at any
    time while headrace is not running; it is then fetched or computed again, but for ``gateway/``, which has
    the ledgers of ``serve --gateway default``.
    """
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification tells programs to ignore relative paths.
    return (base if base.is_absolute() else Path.home() / ".cache") / "headrace"
