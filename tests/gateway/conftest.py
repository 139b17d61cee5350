"""Upstreams that live as long as a module's tests, and state of either kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gateway.redis_server import KINDS, Kind, Place, RunningRedis, place, redis
from tests.gateway.running import Upstreams

Places = Callable[[], Place]


@pytest.fixture(scope="module")
def upstreams() -> Iterator[Upstreams]:
    """A place to start upstreams in."""
    made = Upstreams()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRedis]:
    """A Redis for all tests of a process; each takes a database of its own."""
    with redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """Both kinds of state, one after the other."""
    return request.param


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Makes new and empty state of the kind."""

    def made() -> Place:
        return place(kind, tmp_path_factory.mktemp("state"), lambda: request.getfixturevalue("redis_server"))

    return made
