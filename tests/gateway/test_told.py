"""What upstreams tell of themselves: who loads or drains gets nothing, who is busy for others gets less."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.gateway.told import held_models, requests_of, state_of
from tests.gateway.running import RunningGateway, Upstreams, gateway
from tests.gateway.test_admin import ENV, KEY, free_port
from tests.lab.streaming_server import Streamer

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def metrics(running: int, waiting: int) -> tuple[int, bytes, str]:
    lines = [f'{GAUGES[0]}{{model_name="m"}} {running}.0', f"{GAUGES[1]} {waiting}", "other 3", ""]
    return 200, "\n".join(lines).encode(), "text/plain"


class Two:
    """A gateway before two upstreams of a kind, that is asked what it knows of them."""

    def __init__(self, made: RunningGateway, streamers: list[Streamer], admin: int) -> None:
        self.made, self.streamers, self.admin = made, streamers, admin

    def told(self) -> list[dict[str, Any]]:
        """The admin API's upstreams."""
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{self.admin}/upstreams"
        return list(httpx.get(url, headers=headers, timeout=60).json())

    def wait(self, name: str, *values: Any) -> None:
        """Until both upstreams are known so."""
        self.made.wait(lambda: tuple(each[name] for each in self.told()) == values)

    def served(self, count: int, **body: Any) -> Counter[str]:
        """Who answers so many requests."""
        return Counter(self.made.chat(**body).headers["x-headrace-upstream"] for _ in range(count))


def two(upstreams: Upstreams, folder: Path, kind: str, **models: Any) -> Iterator[Two]:
    started, admin = [upstreams.start() for _ in range(2)], free_port()
    config = {
        "upstreams": {
            f"u{number}": {"url": url, "kind": kind, "models": models or {"m": {}}}
            for number, (_, url) in enumerate(started)
        },
        "authentication": "none",
        "cache": {"enabled": False},
        "health": {"probe_every_s": 0.05},
        "admin": {"key_env": "ADMIN_KEY", "port": admin},
    }
    streamers = [streamer for streamer, _ in started]
    for streamer in streamers:
        streamer.pages = {"/health": (200, b"{}", "application/json"), "/metrics": metrics(0, 0)}
        streamer.pages["/api/version"] = streamer.pages["/health"]
    with gateway(config, folder, ENV) as made:
        yield Two(made, streamers, admin)


@pytest.fixture(scope="module")
def vllm(upstreams: Upstreams, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    yield from two(upstreams, tmp_path_factory.mktemp("vllm"), "vllm")


def test_who_loads_or_drains_gets_nothing_and_comes_back_whole(vllm: Two) -> None:
    good = vllm.streamers[0].pages["/health"]
    vllm.wait("state", "loaded", "loaded")
    for word in ("loading", "draining"):
        vllm.streamers[0].pages["/health"] = (503, json.dumps({"status": word}).encode(), "application/json")
        vllm.wait("state", word, "loaded")
        assert vllm.served(6) == {"u1": 6}
        assert [each["share"] for each in vllm.told()] == [1.0, 1.0], "that is no fault"
        vllm.streamers[0].pages["/health"] = good
        vllm.wait("state", "loaded", "loaded")
        assert set(vllm.served(40)) == {"u0", "u1"}, "turns that it has missed come first"


def test_work_that_others_have_sent_counts(vllm: Two) -> None:
    vllm.streamers[1].pages["/metrics"] = metrics(running=3, waiting=4)
    vllm.wait("others", 0, 7)
    assert vllm.served(6) == {"u0": 6}
    vllm.streamers[1].pages["/metrics"] = (404, b"", "text/plain")
    vllm.wait("others", 0, 0)
    assert set(vllm.served(40)) == {"u0", "u1"}


def test_a_model_in_memory_goes_before_one_to_be_loaded(upstreams: Upstreams, tmp_path: Path) -> None:
    models = {"m": {"name": "llama3"}}
    for pair in two(upstreams, tmp_path, "ollama", **models):
        held = json.dumps({"models": [{"name": "llama3:latest"}]}).encode()
        for streamer, page in zip(pair.streamers, (b'{"models": []}', held), strict=True):
            streamer.pages["/api/ps"] = (200, page, "application/json")
        pair.made.wait(lambda pair=pair: pair.served(4) == {"u1": 4})


@pytest.mark.parametrize(
    ("status", "page", "state"),
    [
        (200, b"", "loaded"),
        (404, b"{}", "loaded"),
        (503, b'{"status": "loading"}', "loading"),
        (503, b'{"error": {"code": 503, "message": "Loading model"}}', "loading"),
        (503, b'{"status": "draining"}', "draining"),
        (503, b'{"status": "failed"}', "failed"),
        (503, b"[]", "failed"),
        (503, b"\xff", "failed"),
        (500, b'{"status": "loading"}', "failed"),
    ],
)
def test_states(status: int, page: bytes, state: str) -> None:
    assert state_of(status, page) == state


@pytest.mark.parametrize(
    ("page", "requests"),
    [
        (metrics(3, 4)[1], 7),
        (b"vllm:num_requests_running 1\n", None),
        (b"vllm:num_requests_running 1\nvllm:num_requests_waiting NaN\n", None),
        (b"vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n", None),
        (b"vllm:num_requests_running x\nvllm:num_requests_waiting 1\n", None),
        (
            b'vllm:num_requests_running{a="1"} 1\nvllm:num_requests_waiting 1e300',
            10**9,
        ),
        (b"\xff\xfe", None),
    ],
)
def test_loads(page: bytes, requests: int | None) -> None:
    assert requests_of(page, GAUGES) == requests


def test_models_in_memory() -> None:
    assert held_models(b'{"models": [{"name": "a:latest"}, {"name": "b:7b"}, {}, 3]}') == {
        "a",
        "a:latest",
        "b:7b",
    }
    for page in (b"", b"[]", b'{"models": 3}'):
        assert held_models(page) is None
