"""What every room's tests share: the real models, pulled once into the user's cache."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.model import store

if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker for each core: torch's threads would only wait for each other, in what tests start as well.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as a shell starts what runs in the background, and whatever that starts: but tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a fifth of the time, a test waits for a server, or for time to pass."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The docs come first, whose pages share a port: no file takes longer, and a file is one worker's.

    Then comes what starts whole programs; small tests fill the end of the run.
    """
    here = Path(__file__).parent
    order = {here: 0, here / "e2e": 1, here / "lab": 1}
    items.sort(key=lambda item: order.get(item.path.parent, 2))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct (GGUF, Q4_1): the default model."""
    return store.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M base (GGUF, Q4_K_M)."""
    return store.resolve("gemma3-270m")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """all-MiniLM-L6-v2 (safetensors, float32): the catalogue's sentence encoder."""
    return store.resolve("minilm-l6")
