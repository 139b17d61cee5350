"""The gateway at work: routing, caching, quotas, a canary, failover, and then the bill.

Run it with ``make demo-gateway``, or ``python examples/demo_gateway.py`` where the extra [gateway] is
installed. It starts the engines that ``gateway.yaml`` beside this file names, and asks nobody outside of this
machine: one more ``headrace serve`` plays the external API. The models are small, so what they say is not the
point. It takes a minute or two, ends all that it has started, and exits with 1 if anything is not as shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMMAND = [sys.executable, "-m", "headrace.cli"]
ENGINES = {  # upstream of gateway.yaml: the model that is served, and further options
    "small": ("smollm2-135m", []),
    "large": ("gemma3-270m", []),
    "encoder": ("minilm-l6", []),
    "external": ("smollm2-135m", ["--served-model-name", "external-large"]),
}
MODEST = ["--port", "0", "--threads", "1", "--kv-cache-memory", "64MiB", "--log-level", "warning"]
EXTERNAL_KEY = "demo-external-key"
START_S = 600.0  # models may have to be fetched first
ANSWER_S = 60.0
KILL_AFTER = 5  # pieces of a stream
GREETING = "Hello! How was your weekend?"
PROGRAM = "Write a Python function that merges two sorted lists, with unit tests."
TALE = "Write a poem about a mill wheel in spring."


class NotAsShown(Exception):
    """Something is not as this demo says."""


def check(holds: bool, what: str) -> None:
    """Print what holds. Raises NotAsShown if it does not."""
    if not holds:
        raise NotAsShown(what)
    print(f"  {what}", flush=True)


def headline(text: str) -> None:
    """A step of the demo."""
    print(f"\n{text}", flush=True)


@dataclass(frozen=True)
class Answer:
    """One answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    text: str

    def header(self, name: str) -> str:
        """``x-headrace-name``, or nothing."""
        return self.headers.get(f"x-headrace-{name}", "")


class Engine:
    """A ``headrace serve`` or ``headrace gateway run``, and the address that it prints."""

    def __init__(self, *arguments: str, log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | (env or {}),
            )

    def address(self) -> str:
        """Where it listens, once it is ready. Raises NotAsShown if it ends instead."""
        assert self._process.stdout is not None
        found = re.search(r"http://[\w.:\[\]]+", self._process.stdout.readline())
        if found is None:
            raise NotAsShown(f"a server did not start: {self._log.read_text()[-2000:]}")
        return found[0]

    def kill(self) -> None:
        """As a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Demo:
    """The engines, the gateway before them, and its clients."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        headline(
            "Starting SmolLM2 (small), Gemma 3 270M (large), MiniLM (encoder), and one more SmolLM2, which"
        )
        print("plays the external API: a demo asks nobody outside of this machine.")
        self.answered = 0
        self.engines: dict[str, Engine] = {}
        for name, (model, more) in ENGINES.items():
            env = {"HEADRACE_API_KEY": EXTERNAL_KEY} if name == "external" else None
            self.engines[name] = Engine("serve", model, *MODEST, *more, log=folder / f"{name}.log", env=env)
            stack.callback(self.engines[name].stop)
        self.file = folder / "gateway.yaml"
        self.file.write_text(yaml.safe_dump(self._config()))
        self.keys = {
            tenant: headrace("gateway", "keys", "create", str(self.file), "--tenant", tenant).strip()
            for tenant in ("acme", "trial")
        }
        env = {"EXTERNAL_API_KEY": EXTERNAL_KEY}
        gateway = Engine("gateway", "run", str(self.file), log=folder / "gateway.log", env=env)
        stack.callback(gateway.stop)
        self.url = gateway.address()
        print(f"The gateway is on {self.url}.")

    def _config(self) -> dict[str, Any]:
        """``gateway.yaml``, with the addresses of what runs here and a canary that makes up its mind soon."""
        config: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gateway.yaml").read_text())
        for name, engine in self.engines.items():
            config["upstreams"][name]["url"] = f"{engine.address()}/v1"
        config["port"] = 0
        config["embeddings"]["timeout_ms"] = 1000 * ANSWER_S  # a machine that is busy shall show the same
        config["releases"]["writer"]["canary"] |= {
            "steps": [50, 100],
            "hold_s": 0.5,
            "min_requests": 4,
            "slo": {"ttft_s": ANSWER_S, "tpot_s": ANSWER_S, "e2e_s": ANSWER_S},
        }
        return config

    def ask(self, tenant: str, body: dict[str, Any]) -> Answer:
        """One request: a chat if it has messages, else a completion."""
        try:
            with self._open(tenant, body) as response:
                answer = Answer(response.status, _headers(response), response.read().decode())
        except urllib.error.HTTPError as refused:
            with refused:
                answer = Answer(refused.code, _headers(refused), refused.read().decode())
        self.answered += answer.status == 200
        return answer

    def lines(self, tenant: str, body: dict[str, Any]) -> Iterator[str]:
        """The lines of a streamed answer."""
        with self._open(tenant, body | {"stream": True}) as response:
            for line in response:
                yield line.decode().rstrip("\n")
        self.answered += 1

    def _open(self, tenant: str, body: dict[str, Any]) -> Any:
        route = "chat/completions" if "messages" in body else "completions"
        headers = {"authorization": f"Bearer {self.keys[tenant]}", "content-type": "application/json"}
        data = json.dumps({"max_tokens": 8, **body}).encode()
        request = urllib.request.Request(f"{self.url}/v1/{route}", data, headers)
        return urllib.request.urlopen(request, timeout=ANSWER_S)

    def usage(self, by: str) -> dict[str, dict[str, Any]]:
        """The ledger's sums, as ``headrace gateway usage --by`` tells them."""
        rows = json.loads(headrace("gateway", "usage", str(self.file), "--by", by, "--json"))
        return {row["group"]: row for row in rows}


def _headers(response: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def headrace(*arguments: str) -> str:
    """What a command prints. Raises NotAsShown if it fails."""
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    if ended.returncode:
        raise NotAsShown(f"headrace {' '.join(arguments)}: {ended.stderr.strip()}")
    return ended.stdout


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def routing(demo: Demo) -> None:
    """One name, three models: by what is asked."""
    headline("Routing: all ask for `auto`")
    for text, asked, model in (
        (GREETING, chat(GREETING), "smollm2-135m"),
        (TALE, {"prompt": TALE}, "gemma3-270m"),
        (PROGRAM, chat(PROGRAM), "external-large"),
    ):
        answer = demo.ask("acme", asked | {"model": "auto"})
        intent, chosen = answer.header("intent"), answer.header("route")
        check(answer.status == 200 and chosen == model, f"{text[:44]:44} {intent:9} -> {chosen}")


def caching(demo: Demo) -> None:
    """The second of two equal questions costs nothing."""
    headline("Caching: the same question three times")
    told = [demo.ask("acme", chat("What is a mill?", model="fast", temperature=0)) for _ in range(3)]
    caches = [answer.header("cache") for answer in told]
    costs = [float(answer.header("cost-usd")) for answer in told]
    check(caches == ["miss", "hit", "hit"], f"cache: {', '.join(caches)}")
    check(costs[0] > 0 and costs[1:] == [0, 0], f"cost: {', '.join(f'${cost:.9f}' for cost in costs)}")


def quotas(demo: Demo) -> None:
    """What a tenant may not, and how many times it may what it may."""
    headline("Quotas: the tenant `trial` may ask `fast`, 20 times a minute")
    refused = demo.ask("trial", chat("Hello!", model="auto"))
    check(refused.status == 403, f"for `auto` it gets {refused.status}")
    statuses = [demo.ask("trial", chat("Hello!", model="fast", temperature=0)) for _ in range(21)]
    served = sum(answer.status == 200 for answer in statuses)
    last = statuses[-1]
    check(served == 20 and last.status == 429, f"of 21 requests {served} are served, one gets {last.status}")
    check("retry-after" in last.headers, f"and is told to come back in {last.headers.get('retry-after')} s")


def canary(demo: Demo) -> None:
    """Another model takes over under traffic."""
    headline("Canary: `writer` goes from SmolLM2 (v1) to Gemma (v2), half of the requests first")
    story = {"model": "writer", "prompt": "The miller said", "temperature": 0.8}
    before = demo.ask("acme", story).header("version")
    check(before == "v1", f"served by {before}")
    print(f"  {headrace('gateway', 'releases', 'start', str(demo.file), 'writer', 'v2').strip()}")
    seen = [before]
    until = time.monotonic() + 2 * ANSWER_S
    while time.monotonic() < until and not _promoted(demo):
        for _ in range(6):
            answer = demo.ask("acme", story)
            if answer.status != 200:
                raise NotAsShown(f"a request was lost during the canary: {answer.text}")
            seen.append(answer.header("version"))
    split = ", ".join(f"{seen.count(version)} by {version}" for version in ("v1", "v2"))
    check(_promoted(demo), f"v2 was promoted by itself after {len(seen)} requests ({split}); none was lost")
    after = demo.ask("acme", story).header("version")
    check(after == "v2", f"served by {after}")


def _promoted(demo: Demo) -> bool:
    listed = headrace("gateway", "releases", "list", str(demo.file)).splitlines()
    return any(line.split()[:2] == ["writer", "v2"] for line in listed)


def failover(demo: Demo) -> None:
    """The large model's server dies in the middle of an answer."""
    headline("Failover: Gemma's server is killed in the middle of a stream")
    told, label, ended, words = "", "", "", {"large": 0, "external": 0}
    killed = False
    body = {"model": "dependable", "prompt": "The river ran", "max_tokens": 96, "temperature": 0}
    for line in demo.lines("acme", body):
        if line.startswith(":"):
            label = line.lstrip(": ")
        elif line == "data: [DONE]":
            ended = line
        elif line.startswith("data: "):
            choices = json.loads(line[6:])["choices"]
            text = choices[0]["text"] if choices else ""
            told += text
            words["external" if label else "large"] += bool(text)
            if words["large"] == KILL_AFTER and not killed:
                demo.engines["large"].kill()
                killed = True
        elif line.startswith("event: error"):
            raise NotAsShown("the stream ended in an error")
    check(killed and bool(label), f"{words['large']} pieces from Gemma, then a comment: {label}")
    check(
        words["external"] > 0 and ended != "", f"{words['external']} more from the external API, then {ended}"
    )
    answer = demo.ask("acme", body)
    check(answer.header("upstream") == "external", f"the next request goes to: {answer.header('upstream')}")


def bill(demo: Demo) -> None:
    """What the ledger knows of all that."""
    headline("The bill, by the gateway's own ledger (headrace gateway usage)")
    tenants = demo.usage("tenant")
    own = tenants.pop("(gateway)", {"requests": 0})
    requests = sum(row["requests"] for row in tenants.values())
    hits = sum(row["cache_hits"] for row in tenants.values())
    failed = sum(row["failed"] for row in tenants.values())
    cost, baseline, cache, routes = (
        sum(row[name] for row in tenants.values())
        for name in ("cost_usd", "baseline_usd", "saved_by_cache_usd", "saved_by_routing_usd")
    )
    for name, row in sorted(tenants.items()):
        spent = f"{row['cache_hits']:3} hits  ${row['cost_usd']:.6f}"
        print(f"  tenant {name:15} {row['requests']:4} requests  {spent}")
    for name, row in sorted(demo.usage("model").items()):
        print(f"  model  {name:15} {row['requests']:4} requests  ${row['cost_usd']:.6f}")
    for name, row in sorted(demo.usage("route").items()):
        asked = row["requests"] - (0 if name else own["requests"])
        print(f"  route  {name or '(none)':15} {asked:4} requests")
    print(f"  besides, {own['requests']} embeddings that the gateway asked for by itself")
    check(requests == demo.answered, f"requests: {requests}, each of those that were answered here")
    check(failed == 0, f"failed: {failed}")
    check(hits == 2 + 19, f"hits: {hits}")
    check(cost > 0, f"cost: ${cost:.6f}")
    saved = f"${cache:.6f} by the cache, ${routes:.6f} by routing"
    check(cache > 0 and routes > 0, f"saved: {saved}, of ${baseline:.6f} without either")


def main() -> int:
    """Run it all; 0 if everything is as shown."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
            demo = Demo(folder, stack)
            for step in (routing, caching, quotas, canary, failover, bill):
                step(demo)
    except (NotAsShown, OSError, subprocess.TimeoutExpired) as error:
        print(f"\nNOT AS SHOWN: {error}", file=sys.stderr)
        return 1
    print(f"\nAll as shown, in {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
