"""Upstreams that live as long as a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.running import Upstreams


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    """A place to start upstreams in."""
    made = Upstreams()
    yield made
    made.stop()
