"""A new configuration while requests go on: all of it or nothing, and nobody notices."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import signal
import threading
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.running import called
from tests.gateway.running import RunningGateway, Upstreams, decent, gateway, text_of
from tests.lab.streaming_server import Behaviour, Exchange


def rewrite(made: RunningGateway, **changes: Any) -> dict[str, Any]:
    """Change the file; what is None goes."""
    config = yaml.safe_load(made.file.read_text())
    config = {name: value for name, value in (config | changes).items() if value is not None}
    made.file.write_text(yaml.safe_dump(config))
    return dict(config)


def log_of(made: RunningGateway) -> str:
    return (made.file.parent / "log").read_text()


def hang_up(made: RunningGateway, said: str) -> None:
    before = log_of(made).count(said)
    made.process.send_signal(signal.SIGHUP)
    made.wait(lambda: log_of(made).count(said) > before)


def held(release: threading.Event) -> Behaviour:
    async def behaviour(exchange: Exchange) -> None:
        exchange.begin()
        events = exchange.events(["one ", "two "], usage=True)
        await exchange.send(events[0])
        while not release.is_set():
            await asyncio.sleep(0.01)
        for event in events[1:]:
            await exchange.send(event)
        await exchange.end()

    return behaviour


def test_requests_under_way_end_where_they_began(upstreams: Upstreams, tmp_path: Path) -> None:
    (first, one), (second, other) = upstreams.start(), upstreams.start()
    release = threading.Event()
    first.behaviour = held(release)
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": one, "models": {"m": {}, "gone": {}}}},
        "tenants": {"acme": {"limits": {"tokens_per_day": 100_000, "concurrency": 4}}},
        "cache": {"enabled": False},
    }
    with gateway(config, tmp_path) as made, concurrent.futures.ThreadPoolExecutor(4) as pool:
        headers = made.key("acme")
        early = [pool.submit(made.chat, headers, model=name, stream=True) for name in ("m", "gone", "m")]
        made.wait(lambda: len(first.asked) == 3)
        rewrite(
            made,
            upstreams={"two": {"url": other, "max_connections": 2000, "models": {"m": {}}}},
            aliases={"new": "m"},
        )
        hang_up(made, "configuration reloaded")
        assert made.metric("upstream_requests") == {'upstream="two"': 0.0, 'upstream="one"': 3.0}
        assert text_of(made.chat(headers, model="new", stream=True)) == "word0 word1 word2 "
        assert made.chat(headers, model="gone").status_code == 404
        assert made.chat(headers).headers["x-headrace-upstream"] == "two"
        assert (len(first.asked), len(second.asked)) == (3, 2)
        release.set()
        assert [text_of(future.result()) for future in early] == ["one two "] * 3
        made.wait_idle()
        assert made.metric("upstream_requests") == {'upstream="two"': 0.0}, "what was removed has left"
        used = made.usage("upstream")
        assert (used["one"]["requests"], used["two"]["requests"]) == (3, 2)


def test_limits_hold_over_a_reload_and_what_was_used_stays(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    tenant = {"limits": {"tokens_per_day": 1000}}
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": tenant},
    }
    with gateway(config, tmp_path) as made:
        headers = made.key("acme")
        for _ in range(3):
            assert made.chat(headers, max_tokens=100).status_code == 200
        rewrite(made, tenants={"acme": {"limits": {"tokens_per_day": 400}}})
        hang_up(made, "configuration reloaded")
        assert made.chat(headers, max_tokens=100).status_code == 429
        rewrite(made, tenants={"other": {}})
        hang_up(made, "configuration reloaded")
        assert made.chat(headers).status_code == 403


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tenants": {"acme": {"limts": {}}}}, r"gateway.yaml:\d+: tenants.acme.limts"),
    ({"aliases": {"x": "nothing"}}, r"gateway.yaml:\d+: aliases.x: .*which no upstream has"),
    ({"state": "elsewhere"}, "`state` cannot change while the gateway runs"),
    ({"cache": {"enabled": False}}, "`cache.enabled` cannot change"),
    ({"port": 1}, "`port` cannot change"),
    ({"upstreams": None}, "`upstreams` are missing"),
]


def test_a_bad_file_changes_nothing(upstreams: Upstreams, tmp_path: Path) -> None:
    _, url = upstreams.start()
    config: dict[str, Any] = {
        "upstreams": {"one": {"url": url, "models": {"m": {}}}},
        "tenants": {"acme": {}},
    }
    with gateway(config, tmp_path) as made:
        headers, good = made.key("acme"), made.file.read_text()
        for changes, said in BAD:
            rewrite(made, **changes, retries={"attempts": 1})
            hang_up(made, "configuration refused")
            assert re.search(said, log_of(made).splitlines()[-1]), log_of(made)
            assert made.chat(headers).status_code == 200
            made.file.write_text(good)
        made.file.write_text("upstreams: {")
        hang_up(made, "configuration refused")
        made.file.unlink()
        hang_up(made, "configuration refused")
        assert made.chat(headers).status_code == 200


def test_health_and_a_releases_trial_outlive_a_reload(upstreams: Upstreams, tmp_path: Path) -> None:
    (_, one), (bad, other) = upstreams.start(), upstreams.start()

    async def broken(exchange: Exchange) -> None:
        await exchange.error(500, "no")

    bad.behaviour = broken
    config: dict[str, Any] = {
        "upstreams": {
            "one": {"url": one, "models": {"m": {}}},
            "two": {"url": other, "weight": 5, "models": {"m": {}}},
        },
        "releases": {"r": {"versions": {"a": {"model": "m"}, "b": {"model": "m"}}}},
        "authentication": "none",
        "cache": {"enabled": False},
        "health": {"eject_after": 2, "eject_s": 60},
    }
    with gateway(config, tmp_path) as made:
        made.wait(lambda: made.chat() is not None and made.metric("upstream_share")['upstream="two"'] == 0)
        assert called("gateway", "releases", "start", str(made.file), "r", "b").returncode == 0
        made.wait(lambda: made.metric("release_weight")['release="r",version="b"'] == 5)
        rewrite(made, retries={"attempts": 2}, admission={"max_running": 10})
        hang_up(made, "configuration reloaded")
        assert made.metric("upstream_share")['upstream="two"'] == 0, "it is still ejected"
        assert made.metric("release_weight")['release="r",version="b"'] == 5
        rewrite(made, releases=None)
        hang_up(made, "configuration reloaded")
        rewrite(made, releases={"r": {"versions": {"a": {"model": "m"}}}})
        hang_up(made, "configuration refused")
        assert "b is in a canary" in log_of(made)
        bad.behaviour = decent
        made.wait_idle()
