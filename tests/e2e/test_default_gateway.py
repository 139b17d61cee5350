"""`headrace serve --gateway default`: a ledger in front, and otherwise the server as it is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.paths import cache_dir
from tests.e2e.running import RunningServer, run, serving
from tests.gateway.running import events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "smollm2-135m"
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from one to twenty."}],
    "max_tokens": 8,
    "temperature": 0,
}
KEY = {"authorization": "Bearer a-key-of-the-server"}


@pytest.fixture(scope="module")
def cache(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache folder with the user's models and no ledgers, as an environment."""
    folder = tmp_path_factory.mktemp("cache")
    for each in cache_dir().iterdir():
        if each.name != "gateway":
            (folder / each.name).symlink_to(each)
    return {"HEADRACE_CACHE": str(folder)}


@pytest.fixture(scope="module")
def ours(cache: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that runs one request at a time, of whoever has its key."""
    one = ("--max-num-seqs", "1", "--max-waiting", "1", "--max-queue-time", "600")
    key = ("--api-key", KEY["authorization"].split()[1])
    log = tmp_path_factory.mktemp("default") / "log"
    with serving("--gateway", "default", *one, *key, env=cache, log=log) as server:
        yield server


def ask(server: RunningServer, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=KEY, timeout=300)


def usage(cache: dict[str, str], *options: str, word: str = "default") -> dict[str, dict[str, Any]]:
    """The ledger's sums, as the command tells them."""
    told = run("gateway", "usage", word, "--json", *options, env=cache)
    assert told.returncode == 0, told.stderr
    return {row["group"]: row for row in json.loads(told.stdout)}


def test_answers_are_the_servers_own_and_nothing_is_kept(server: RunningServer, ours: RunningServer) -> None:
    direct = httpx.post(server.url + CHAT, json=QUESTION, timeout=300).json()
    for _ in range(2):
        whole = ask(ours, QUESTION)
        assert whole.json()["choices"] == direct["choices"]
        assert whole.json()["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
        assert (whole.headers["x-headrace-cache"], whole.headers["x-headrace-upstream"]) == ("off", "local")
    *chunks, last = events(ask(ours, QUESTION | {"stream": True}))
    told = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(told) == direct["choices"][0]["message"]["content"]
    assert last == "[DONE]"
    ours.wait_idle()


def test_the_ledger_is_found_by_the_word(ours: RunningServer, cache: dict[str, str]) -> None:
    before = usage(cache).get("default", {"requests": 0, "completion_tokens": 0})
    used = ask(ours, QUESTION | {"max_tokens": 5, "ignore_eos": True}).json()["usage"]["completion_tokens"]
    after = usage(cache)["default"]
    assert after["requests"] == before["requests"] + 1
    assert after["completion_tokens"] == before["completion_tokens"] + used
    assert usage(cache, "--by", "model", word=f"default:{MODEL}")[MODEL]["requests"] == after["requests"]


def test_it_asks_for_the_servers_key_and_no_other(ours: RunningServer, cache: dict[str, str]) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY['authorization']}"},
    ):
        answer = httpx.post(ours.url + CHAT, json=QUESTION, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        models = httpx.get(f"{ours.url}/v1/models", headers=headers, timeout=60)
        tokens = httpx.post(f"{ours.url}/tokenize", json={"prompt": "a"}, headers=headers, timeout=60)
        assert (models.status_code, tokens.status_code) == (401, 401)
    models = httpx.get(f"{ours.url}/v1/models", headers=KEY, timeout=300)
    assert models.json()["data"][0]["id"] == MODEL
    refused = run("gateway", "keys", "create", "default", "--tenant", "default", env=cache)
    assert refused.returncode == 1
    assert "--api-key" in refused.stderr


def test_a_server_that_has_no_room_says_so_itself(ours: RunningServer) -> None:
    """503, not 429; and who comes when there is room again need not wait for anything."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    leave = threading.Event()

    def hold() -> None:
        with httpx.stream("POST", ours.url + TEXT, json=body, headers=KEY, timeout=300) as answer:
            for _ in answer.iter_raw():
                if leave.is_set():
                    return

    def wait(true: Callable[[], bool]) -> None:
        while not true():
            leave.wait(0.02)

    holding = [threading.Thread(target=hold) for _ in range(2)]
    holding[0].start()
    wait(lambda: ours.metric("vllm:num_requests_running") == 1)
    holding[1].start()
    wait(lambda: ours.metric("vllm:num_requests_waiting") == 1)
    refused = ask(ours, QUESTION)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"]
    leave.set()
    for thread in holding:
        thread.join()
    ours.wait_idle(60)
    assert ask(ours, QUESTION).status_code == 200


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_nothing_that_connects_is_loaded(ours: RunningServer) -> None:
    mapped = Path(f"/proc/{ours.process.pid}/maps").read_text()
    assert "_sqlite3" in mapped
    assert not re.search("aiohttp|yarl|multidict|frozenlist|usearch", mapped)


def test_it_drains_and_the_ledger_stays(ours: RunningServer, cache: dict[str, str]) -> None:
    """The last test of this server's."""
    before = usage(cache)["default"]["requests"]
    assert ask(ours, QUESTION).status_code == 200
    assert ours.stop() == 0
    assert usage(cache)["default"]["requests"] == before + 1
    copied = run("gateway", "backup", "default", str(Path(cache["HEADRACE_CACHE"], "copy")), env=cache)
    assert copied.returncode == 0, copied.stderr


def test_it_is_open_without_a_key_and_names_have_ledgers_of_their_own(
    ours: RunningServer, cache: dict[str, str]
) -> None:
    """`ours` has made the first ledger; a name with slashes makes one folder more, in the same place."""
    name = "team/model:1"
    with serving("--gateway", "default", "--served-model-name", name, env=cache) as server:
        body = {"model": name, "prompt": "Once", "max_tokens": 2}
        assert httpx.post(server.url + TEXT, json=body, timeout=60).status_code == 200
        assert httpx.post(server.url + TEXT, json=body | {"model": MODEL}, timeout=60).status_code == 404
        assert server.stop() == 0
    assert usage(cache, word=f"default:{name}")["default"]["requests"] == 1
    assert len([*Path(cache["HEADRACE_CACHE"], "gateway").iterdir()]) == 2
    several = run("gateway", "usage", "default", env=cache)
    assert several.returncode == 1
    assert f"default:{MODEL}, default:{name}" in several.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["serve", "--port", "0", "--gateway", "default", "--checkpoint-path", "x"],
            "--checkpoint-path does not",
        ),
        (["serve", "--port", "0", "--gateway", "default", "--served-model-name", "a b"], "a b is no name"),
        (["gateway", "usage", "default"], "`headrace serve MODEL --gateway default` begins one"),
        (["gateway", "usage", "default:m"], "`headrace serve MODEL --gateway default` begins one"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = run(*arguments, env={"HEADRACE_CACHE": str(tmp_path)})
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_the_other_commands_say_what_it_lacks(ours: RunningServer, cache: dict[str, str]) -> None:
    word = f"default:{MODEL}"
    for arguments, said in (
        (["run", word, "--port", "0"], "that is for `headrace serve MODEL --gateway`"),
        (["reload", word], "no admin section"),
        (["cache", "stats", word], "no cache"),
        (["usage", "default:none"], f"there is no ledger of none; there is default:{MODEL}"),
    ):
        ended = run("gateway", *arguments, env=cache)
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
        assert said in ended.stderr
