"""Another engine behind the gateway: llama.cpp's server, where there is a Python with the package xllamacpp.

``HEADRACE_LLAMA_CPP_PYTHON`` names that Python; the one that ``benchmarks/peers`` has installed does, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.paths import cache_dir
from tests import http
from tests.e2e.faulty_proxy import FaultyProxy, Proxies
from tests.e2e.running import serving
from tests.e2e.test_gateway_chaos import Told
from tests.gateway.running import RunningGateway, gateway

SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 2, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
QUESTION: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Count from one to twenty."}],
    "max_tokens": 24,
    "temperature": 0,
}


def python() -> Path | None:
    """The Python that has llama.cpp."""
    named = os.environ.get("HEADRACE_LLAMA_CPP_PYTHON")
    found = Path(named) if named else cache_dir() / "peers" / "llama.cpp" / "bin" / "python"
    return found if found.exists() else None


@pytest.fixture(scope="module")
def llama_cpp(smollm2_path: Path) -> Iterator[str]:
    """The address of its server on our default model."""
    interpreter = python()
    if interpreter is None:
        pytest.skip("no Python with xllamacpp: set HEADRACE_LLAMA_CPP_PYTHON")
    command = [str(interpreter), "-c", SERVER, str(smollm2_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            yield next(line.strip() for line in lines if line.startswith("http"))
        finally:
            process.kill()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    started = Proxies()
    yield started
    started.stop()


@contextlib.contextmanager
def in_front(
    folder: Path, first: tuple[str, str], second: tuple[str, str] | None = None
) -> Iterator[RunningGateway]:
    """A gateway whose requests go to ``first`` (a kind and an address), and elsewhere only if that breaks."""
    pairs = [first] if second is None else [first, second]
    upstreams = {
        f"{number}-{kind}": {
            "url": f"{url}/v1",
            "kind": kind,
            "weight": 1000.0 ** (1 - number),
            "models": {"m": {"name": "smollm2-135m"}},
        }
        for number, (kind, url) in enumerate(pairs)
    }
    config = {
        "upstreams": upstreams,
        "authentication": "none",
        "cache": {"enabled": False},
        "health": {"eject_after": 100, "probe_every_s": 0.2},
    }
    with gateway(config, folder) as made:
        yield made


def read(answer: httpx.Response) -> tuple[Told, bool]:
    """What was told, and whether it was labelled as a text that another upstream continues."""
    *blocks, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", ""), answer.text[-500:]
    chunks = [json.loads(block[6:]) for block in blocks if block.startswith("data: ")]
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Told(choices, usage[-1] if usage else None), any(block.startswith(":") for block in blocks)


def stream(made: RunningGateway) -> httpx.Response:
    asked = QUESTION | {"stream": True, "stream_options": {"include_usage": True}}
    return made.client.post("/v1/chat/completions", json=asked)


def said_before(answer: httpx.Response) -> str:
    """The text that came before the break."""
    blocks = answer.text.split(": headrace", 1)[0].strip().split("\n\n")
    chunks = [json.loads(block[6:]) for block in blocks]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def broken(proxies: Proxies, url: str) -> FaultyProxy:
    """A proxy that breaks streams off after a few words."""
    proxy = proxies.start(url)
    proxy.fault, proxy.cut_after_bytes = "half", 2000
    return proxy


def test_its_answers_are_its_own(llama_cpp: str, tmp_path: Path) -> None:
    direct = http.post(f"{llama_cpp}/v1/chat/completions", json=QUESTION, timeout=60).json()
    with in_front(tmp_path, ("llamacpp", llama_cpp)) as made:
        whole = made.client.post("/v1/chat/completions", json=QUESTION).json()
        assert whole["choices"] == direct["choices"]
        told, labelled = read(stream(made))
        assert told.text == direct["choices"][0]["message"]["content"]
        assert (told.ends, told.roles, labelled) == (["length"], 1, False)
        assert told.usage is not None
        assert told.usage["completion_tokens"] == 24
        prompt = {"model": "m", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
        assert made.client.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
        assert made.client.get("/v1/models/m").json()["max_model_len"]
        made.wait_idle()
        settled = made.usage()["default"]
        assert settled["completion_tokens"] == 24 + 24 + 4


@pytest.mark.parametrize("first", ["llamacpp", "headrace"])
def test_it_goes_on_with_a_text(llama_cpp: str, first: str, proxies: Proxies, tmp_path: Path) -> None:
    """Of its own, and of ours: nothing missing, nothing twice."""
    with contextlib.ExitStack() as stack:
        url = llama_cpp
        if first == "headrace":
            url = stack.enter_context(serving("smollm2-135m", "--threads", "1")).url
        undisturbed = http.post(
            f"{url}/v1/chat/completions", json=QUESTION | {"model": "smollm2-135m"}, timeout=60
        ).json()["choices"][0]["message"]["content"]
        proxy = broken(proxies, url)
        made = stack.enter_context(in_front(tmp_path, (first, proxy.url), ("llamacpp", llama_cpp)))
        answer = stream(made)
        told, labelled = read(answer)
        assert proxy.cuts == 1
        assert labelled
        assert (len(told.ends), told.roles) == (1, 1)
        before = said_before(answer)
        assert len(before) > 5
        assert undisturbed.startswith(before)
        # greedy: what comes next is what would have come, whatever follows later
        assert told.text.startswith(undisturbed[: len(before) + 5]), (told.text, undisturbed)
        assert told.usage is not None
        assert told.usage["completion_tokens"] <= 25
        made.wait_idle()


def test_ours_goes_on_with_a_text_of_its(llama_cpp: str, proxies: Proxies, tmp_path: Path) -> None:
    with serving("smollm2-135m", "--threads", "1") as server:
        proxy = broken(proxies, llama_cpp)
        with in_front(tmp_path, ("llamacpp", proxy.url), ("headrace", server.url)) as made:
            answer = stream(made)
            told, labelled = read(answer)
            assert (proxy.cuts, labelled, len(told.ends), told.roles) == (1, True, 1, 1)
            undisturbed = http.post(f"{llama_cpp}/v1/chat/completions", json=QUESTION, timeout=60).json()
            text = undisturbed["choices"][0]["message"]["content"]
            assert told.text.startswith(text[: len(said_before(answer)) + 5]), (told.text, text)
            made.wait_idle()
        server.wait_idle()
