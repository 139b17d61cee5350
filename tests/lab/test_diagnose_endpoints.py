"""diagnose against endpoints that are odd, broken, far away or not there; what its command line refuses."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import AuthenticationError, HeadraceError
from headrace.lab.bench.process_watch import Devices, listening_pid
from tests.lab.measuring import running, small_headrace
from tests.lab.streaming_server import Behaviour, Exchange, Streamer

_SHORT = ["--seconds", "2", "--prompt-tokens", "24", "--output-tokens", "6"]


def diagnosis(address: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["diagnose", address, *_SHORT, "--json", *options])
    assert done.exception is None, done.exception
    return json.loads(done.stdout)["diagnosis"]


def first_of(found: dict[str, Any]) -> dict[str, Any]:
    """The first finding about the endpoint: before it may stand, rightly, that other tests use the cores."""
    return next(finding for finding in found["findings"] if finding["cause"] != "machine_shared")


def refusal(*arguments: str) -> HeadraceError:
    done = CliRunner().invoke(app, ["diagnose", *arguments])
    assert isinstance(done.exception, HeadraceError), done.output
    assert "\n" not in done.exception.message
    return done.exception


def later(behaviour: Behaviour, after: int) -> Streamer:
    """Decent for the first requests, which are diagnose's own, then as ``behaviour`` is."""
    streamer = Streamer(first_s=0.005, gap_s=0.002)

    async def answer(exchange: Exchange) -> None:
        await (streamer.decent if len(streamer.asked) <= after else behaviour)(exchange)

    streamer.behaviour = answer
    return streamer


def test_nobody_there() -> None:
    assert "nothing answers" in refusal("http://127.0.0.1:9", *_SHORT).message


def test_a_wrong_key() -> None:
    with small_headrace(api_key="right") as address:
        assert isinstance(refusal(address, *_SHORT, "--api-key", "wrong"), AuthenticationError)
        assert diagnosis(address, "--api-key", "right")["engine"] == "headrace"


def test_a_web_page() -> None:
    async def html(exchange: Exchange) -> None:
        await exchange.whole(200, b"<html>Log in</html>", "text/html")

    with running(Streamer(behaviour=html)) as address:
        assert "does not speak OpenAI's API" in refusal(address, *_SHORT).message


def test_no_stream_and_no_usage() -> None:
    async def whole(exchange: Exchange) -> None:
        await asyncio.sleep(0.01)
        message = {"role": "assistant", "content": "word"}
        body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        await exchange.whole(200, json.dumps(body).encode())

    with running(Streamer(behaviour=whole)) as address:
        found = diagnosis(address)
    notes = " ".join(found["notes"])
    assert "does not stream" in notes and "no usage" in notes
    assert found["ttft"] is None and found["findings"]


def test_odd_chunks_are_read_all_the_same() -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.begin()
        whole = b": hello\n\n" + b"".join(exchange.events(["naïve ", "日本 "] * 3))
        for at in range(0, len(whole), 50):
            await exchange.send(whole[at : at + 50])
        await exchange.end()

    with running(Streamer(behaviour=cut)) as address:
        found = diagnosis(address)
    assert all(not lv["errors"] for lv in found["measurements"]["levels"])
    assert found["ttft"]["source"] == "slope"


def test_a_rate_limit_is_named() -> None:
    async def limited(exchange: Exchange) -> None:
        await exchange.whole(429, b'{"error": {"message": "slow down"}}', extra="retry-after: 1\r\n")

    streamer = later(limited, 10**9)
    decent = streamer.behaviour
    busy = 0

    async def two_at_once(exchange: Exchange) -> None:
        nonlocal busy
        busy += 1
        try:
            await (decent if busy <= 2 else limited)(exchange)
        finally:
            busy -= 1

    streamer.behaviour = two_at_once
    with running(streamer) as address:
        first = first_of(diagnosis(address))
    assert first["cause"] == "queueing"
    assert any("rate_limited" in line and "slow down" in line for line in first["evidence"])


def test_errors_in_mid_stream_are_named() -> None:
    async def breaks(exchange: Exchange) -> None:
        exchange.begin()
        await exchange.send(exchange.events(["word "])[1])
        await exchange.send(b'data: {"error": {"message": "a device was lost"}}\n\n')
        await exchange.end()

    with running(later(breaks, 12)) as address:
        first = first_of(diagnosis(address))
    assert first["cause"] == "errors"
    assert any("a device was lost" in line for line in first["evidence"])


def test_a_server_that_hangs_ends_in_one_line() -> None:
    async def hang(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    with running(later(hang, 3)) as address:
        error = refusal(address, *_SHORT, "--timeout", "0.3")
    assert "can't be diagnosed" in error.message and "timeout" in error.message


@contextmanager
def far(address: str, one_way_s: float) -> Iterator[str]:
    """A way to ``address`` on which everything takes ``one_way_s``, handshakes' answers included."""
    import threading

    port = int(address.rpartition(":")[2])
    loop = asyncio.new_event_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            loop.call_later(one_way_s, writer.write, data)
        loop.call_later(one_way_s, writer.close)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back), carry(there, writer))

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def test_a_far_server_answers_cheap_requests_as_late() -> None:
    """The proxy's handshake is near, its answers are not: what is cheap for the server tells the distance."""
    with small_headrace(step_s=0.001) as near, far(near, 0.04) as address:
        found = diagnosis(address)
    assert found["measurements"]["network"]["connect_ms"] < 40
    first = first_of(found)
    assert first["cause"] == "network" and found["ttft"]["network_ms"] > 75


def test_the_report_is_for_people_and_the_file_for_machines(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with small_headrace(step_s=0.002) as address:
        done = CliRunner().invoke(app, ["diagnose", address, *_SHORT, "--output", str(path)])
    assert done.exit_code == 0, done.exception
    for words in ("confidence", "TTFT", "prefill", "frontend", "TPOT", "neighbours", "Why", "try:", "gains:"):
        assert words in done.stdout, words
    written = json.loads(path.read_bytes())["diagnosis"]
    assert written["schema"] == "headrace-diagnose/1"
    assert written["findings"][0]["title"] in done.stdout
    assert [lv["users"] for lv in written["measurements"]["levels"]][:2] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://h:1", "--serve", "--threads 1"], "--serve"),
        (["no-such-model"], "no-such-model"),
        (["--prompts", "missing.jsonl"], "missing.jsonl can't be read"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_OFFLINE", "1")
    assert said in refusal(*arguments).message


def test_the_process_behind_a_port_is_found() -> None:
    with running(Streamer()) as address:
        assert listening_pid(int(address.rpartition(":")[2])) == os.getpid()
    assert listening_pid(1) is None


def test_devices_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML as documented, played by a module: two devices, one of which the process uses."""
    nvml = types.ModuleType("pynvml")
    of = types.SimpleNamespace
    calls: dict[str, Any] = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: b"H100" if index else "L4",
        "nvmlDeviceGetUtilizationRates": lambda index: of(gpu=40 if index else 90),
        "nvmlDeviceGetMemoryInfo": lambda index: of(used=60, total=80),
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [of(pid=os.getpid())] if index else [],
    }
    vars(nvml).update(calls)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    devices = Devices(os.getpid())
    assert devices.names == ["H100"]
    assert devices.sample() == {"device_busy": 0.4, "device_memory": 0.75}
    devices.close()
    assert devices.sample() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Devices(None).sample() == {}
