"""kill -9 in the middle of streams, and the same streams from the next process."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests import http
from tests.e2e.running import RunningServer, run, serving

CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a mill."}], "max_tokens": 80}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {**CHAT, "seed": 1}),
    ("chat/completions", {**CHAT, "seed": 2, "n": 2, "logprobs": True, "stop": ["the wheel", "zzz"]}),
    ("chat/completions", {**CHAT, "temperature": 0, "frequency_penalty": 0.6, "timeout_s": 300}),
    ("completions", {"prompt": ["Water runs", "A wheel"], "seed": 3, "max_tokens": 60, "ignore_eos": True}),
    ("completions", {"prompt": "1, 2,", "guided_regex": "( [0-9]+,){30}", "seed": 4, "max_tokens": 120}),
]
LATE = ("completions", {"prompt": "Long ago", "seed": 5, "max_tokens": 300, "ignore_eos": True})


class Stream:
    """One client: what it has got, event by event, and where it was when its connection broke."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.last_id = ""
        self.whole = False

    def read(self, response: httpx.Response) -> None:
        assert response.status_code == 200
        name = ""
        for line in response.iter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                self.whole = data == "[DONE]"
                if not self.whole:
                    self.events.append(json.loads(data))
                self.last_id, name = name or self.last_id, ""

    def start(self, url: str, path: str, body: dict[str, Any]) -> threading.Thread:
        def work() -> None:
            try:
                with http.stream(
                    "POST", f"{url}/v1/{path}", json=body | {"stream": True}, timeout=120
                ) as response:
                    self.read(response)
            except httpx.HTTPError:
                pass  # the server has been killed

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def resume(self, url: str) -> None:
        headers = {"last-event-id": self.last_id} if self.last_id else {}
        path = f"{url}/v1/requests/{self.events[0]['id']}"
        with http.stream("GET", path, headers=headers, timeout=120) as response:
            assert response.headers["x-headrace-resumed"] == "exact"
            self.read(response)

    def said(self) -> dict[Any, Any]:
        """By choice: its text, log-probabilities and ends."""
        out: dict[Any, Any] = {}
        for each in self.events:
            assert "error" not in each, each
            for choice in each["choices"]:
                text, logprobs, ends = out.setdefault(choice["index"], ([], [], []))
                text.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                logprobs += (choice.get("logprobs") or {}).get("content") or []
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        return {index: ("".join(text), logprobs, ends) for index, (text, logprobs, ends) in out.items()}


def start_all(server: RunningServer) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [Stream() for _ in REQUESTS]
    return streams, [
        stream.start(server.url, *asked) for stream, asked in zip(streams, REQUESTS, strict=True)
    ]


def wait_for(streams: list[Stream], events: int) -> None:
    deadline = time.monotonic() + 60
    while not all(len(stream.events) >= events or stream.whole for stream in streams):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_kill_9_in_the_middle_of_streams(smollm2_path: Path, tmp_path: Path) -> None:
    """The server died and took every answer with it; then each began again, with other words."""
    folder, model = str(tmp_path / "kept"), str(smollm2_path)
    with serving(model) as plain:
        streams, threads = start_all(plain)
        late = Stream()
        for thread in [*threads, late.start(plain.url, *LATE)]:
            thread.join()
        expected_late = late.said()
        expected = [stream.said() for stream in streams]
        assert all(stream.whole for stream in streams)

    with serving(model, "--checkpoint-path", folder) as first:
        streams, threads = start_all(first)
        wait_for(streams, 12)
        first.process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
        cut = [stream for stream in streams if not stream.whole]
        assert len(cut) > 2, "they were to be cut"

    with serving(model, "--checkpoint-path", folder, log=tmp_path / "log") as second:
        refused = run("serve", model, "--port", "0", "--checkpoint-path", folder)
        assert refused.returncode != 0
        assert "in use by another process" in refused.stderr and "Traceback" not in refused.stderr
        second.process.send_signal(signal.SIGUSR1)
        wait_for(streams, 12)
        for stream in cut[:2]:
            stream.resume(second.url)
        # and once more, this time by the book: running streams get no time at all
        assert second.stop(signal.SIGKILL) < 0
    with serving(model, "--checkpoint-path", folder, "--engine-process", "--drain-timeout", "0") as third:
        for stream in cut[2:]:
            stream.resume(third.url)
        assert [stream.said() for stream in streams] == expected
        assert all(stream.whole for stream in streams)
        late = Stream()
        thread = late.start(third.url, *LATE)
        wait_for([late], 5)
        [engine] = psutil.Process(third.process.pid).children()
        engine.kill()  # alone: nobody notices
        wait_for([late], 20)
        assert psutil.Process(third.process.pid).children() != [engine]
        third.stop()
        thread.join()
        assert "error" in late.events.pop(), "the client learns that its stream has been cut"
    with serving(model, "--checkpoint-path", folder) as fourth:
        late.resume(fourth.url)
        assert late.said() == expected_late
    assert b'"event":"checkpoint"' in (tmp_path / "log").read_bytes()
