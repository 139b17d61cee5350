"""One server on the default model for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.running import RunningServer, serving


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """``headrace serve`` with all defaults but threads, on the model that is pulled already."""
    with serving(log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The openai SDK, without retries, so that failures are seen."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def anyio_backend() -> str:
    """What anyio's plugin runs tests marked ``anyio`` on."""
    return "asyncio"
