"""What the client itself adds to every time: measured against a server that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from headrace.lab.bench import noop_server
from headrace.lab.bench.client import ask
from headrace.lab.bench.endpoint import Endpoint
from headrace.lab.bench.records import Record

if TYPE_CHECKING:
    import aiohttp

_SECONDS = 0.4
_WARM = 5  # first requests open the connection
_START_S = 5.0


class ClientFloor(msgspec.Struct, kw_only=True):
    """No server looks faster than this from here: TTFT and TPOT against a no-op server, one
    request at a time, in milliseconds; ``requests``: how many showed it.
    """

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    requests: int


async def client_floor(session: aiohttp.ClientSession) -> ClientFloor | None:
    """Half a second of requests to a no-op server in a process of its own; None where none can be started."""
    records: list[Record] = []
    async with _noop_server() as address:
        if address is None:
            return None
        endpoint = Endpoint(base_url=address, model="noop", headers={"Content-Type": "application/json"})
        body = endpoint.body([{"role": "user", "content": "word " * 128}], noop_server.TOKENS)
        until = time.perf_counter() + _SECONDS
        while time.perf_counter() < until:
            record = Record(index=len(records), scheduled_s=time.perf_counter())
            await ask(session, endpoint.url, body, endpoint.headers, _START_S, record, time.perf_counter)
            if not record.ok:
                return None
            records.append(record)
    ttft = [record.ttft_s * 1000 for record in records[_WARM:] if record.ttft_s is not None]
    tpot = [record.tpot_s * 1000 for record in records[_WARM:] if record.tpot_s is not None]
    if not ttft or not tpot:
        return None
    p50, p99 = np.percentile(ttft, (50, 99))
    return ClientFloor(
        ttft_p50_ms=round(float(p50), 3),
        ttft_p99_ms=round(float(p99), 3),
        tpot_p50_ms=round(float(np.median(tpot)), 4),
        requests=len(ttft),
    )


@contextlib.asynccontextmanager
async def _noop_server() -> AsyncIterator[str | None]:
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", str(Path(noop_server.__file__))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        yield None
        return
    try:
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        yield f"http://127.0.0.1:{int(line)}/v1" if line.strip().isdigit() else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
