"""What tests of several files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.training import make_files


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of :func:`tests.lab.training.make_files`, made once; nobody writes into it."""
    return make_files(tmp_path_factory.mktemp("taught"))
