"""How a download tells of itself."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called now and then with what is fetched, bytes so far, and bytes in all (0 = unknown)."""
