"""Kernel paths under test: the one that HEADRACE_ISA names, else all that this CPU has."""

from __future__ import annotations

import os

import pytest

from headrace.backend.cpu import _native

_WANTED = os.environ.get("HEADRACE_ISA")


@pytest.hookimpl(tryfirst=True)  # before anything is selected by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that go through all paths by themselves."""
    for item in items:
        if "isa" in getattr(item, "fixturenames", ()):
            item.add_marker("every_isa")


@pytest.fixture(scope="module", params=[_WANTED] if _WANTED else _native.supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """A kernel path."""
    path: str = request.param
    return path
