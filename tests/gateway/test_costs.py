"""What time on one's own hardware costs: those who use it at the same time share it."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path

import pytest

from tests.gateway.running import Upstreams, gateway
from tests.gateway.test_balance import waits_for


def test_time_is_paid_by_who_uses_it(upstreams: Upstreams, tmp_path: Path) -> None:
    """A dollar a second: three at once pay no more than the seconds that passed, and tokens on top."""
    streamer, url = upstreams.start()
    config = {
        "upstreams": {
            "own": {"url": url, "usd_per_hour": 3600, "models": {"m": {}, "dear": {"price": {"output": 1e6}}}}
        },
        "tenants": {"acme": {}, "poor": {"limits": {"budget_usd": 1}}},
        "cache": {"enabled": False},
        "request_timeout_s": 60,
    }
    with gateway(config, tmp_path) as made, concurrent.futures.ThreadPoolExecutor(3) as pool:
        key, release, began = made.key("acme"), threading.Event(), time.monotonic()
        streamer.behaviour = waits_for(release)
        try:
            asked = [pool.submit(made.chat, key, stream=stream) for stream in (True, False, True)]
            made.wait(lambda: sum(made.metric("upstream_requests").values()) == 3)
        finally:
            release.set()
        assert all(future.result().status_code == 200 for future in asked)
        made.wait_idle()
        passed_s = time.monotonic() - began
        costs = [row["nano_usd"] / 1e9 for row in made.rows("acme")]
        assert len(costs) == 3
        assert all(cost > 0 for cost in costs)
        assert sum(costs) <= passed_s
        assert [row["baseline_nano_usd"] for row in made.rows("acme")] == pytest.approx(
            [cost * 1e9 for cost in costs]
        ), "nothing was saved"

        whole = made.chat(key, model="dear", max_tokens=2)
        assert float(whole.headers["x-headrace-cost-usd"]) > 2.0
        refused = made.chat(made.key("poor"))
        assert refused.json()["error"]["code"] == "insufficient_quota", "it might take 60 seconds"
