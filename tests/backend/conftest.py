"""Kernel paths under test: the one that HEADRACE_ISA names, else all that this CPU has."""

from __future__ import annotations

import os

import pytest

from headrace.backend.cpu import _native

_WANTED = os.environ.get("HEADRACE_ISA")


@pytest.fixture(scope="module", params=[_WANTED] if _WANTED else _native.supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """A kernel path."""
    path: str = request.param
    return path
