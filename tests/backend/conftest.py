"""Kernel paths under test: the one that HEADRACE_ISA names, else all that this CPU has."""

from __future__ import annotations

import os

import pytest

from headrace.backend.cpu import _native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``isa`` once for each path."""
    if "isa" in metafunc.fixturenames:
        wanted = os.environ.get("HEADRACE_ISA")
        metafunc.parametrize("isa", [wanted] if wanted else _native.supported_isas(), scope="module")
