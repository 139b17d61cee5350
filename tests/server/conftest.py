"""Asynchronous tests run on asyncio."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """What anyio's plugin runs tests marked ``anyio`` on."""
    return "asyncio"
