"""Answers that a server's death interrupted: the next process gives the rest, each byte of it once."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import CheckpointConfig
from headrace.engine.journal_file import MAGIC, read_records
from headrace.frontend.frontend import Frontend
from tests.server.small_server import RawClient, connected, events, idle, small_app, small_frontend, until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 30}},
            "required": ["at"],
        },
    },
}
JOURNAL = "requests.journal"
USAGE = {"include_usage": True}

Opener = Callable[..., Frontend]


@pytest.fixture
def open_frontend(tmp_path: Path) -> Iterator[Opener]:
    """Frontends that keep their requests in a folder; all are closed in the end."""
    opened: list[Frontend] = []

    def make(folder: str = "first", *, grace_s: float = 60.0, **kwargs: Any) -> Frontend:
        config = CheckpointConfig(str(tmp_path / folder), interval_s=0.0, grace_s=grace_s)
        opened.append(small_frontend(checkpoint=config, **kwargs))
        return opened[-1]

    yield make
    for frontend in opened:
        frontend.close()


async def killed(frontend: Frontend, tmp_path: Path, to: str = "second") -> None:
    """Copy what a process that died now would leave."""
    assert frontend.journal is not None
    await asyncio.to_thread(frontend.journal.sync)
    shutil.copytree(tmp_path / "first", tmp_path / to)


def named_events(text: str) -> list[tuple[str | None, Any]]:
    """Id and data of each event."""
    out = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            data = fields["data"]
            out.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return out


def joined(found: list[tuple[str | None, Any]]) -> dict[Any, Any]:
    """What events say, put together: by choice its text, logprobs, calls and ends; and the rest."""
    said: dict[Any, Any] = {}

    def add(key: Any, value: Any) -> None:
        said[key] = said[key] + value if key in said else value

    for _, data in found:
        if data == "[DONE]":
            add("done", 1)
            continue
        assert "error" not in data, data
        if not data["choices"]:
            add("usage", [data["usage"]])
        for choice in data["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {})
            add((index, "role"), [delta["role"]] if "role" in delta else [])
            add((index, "text"), choice.get("text") or delta.get("content") or "")
            if choice["finish_reason"]:
                add((index, "end"), [choice["finish_reason"], choice.get("stop_reason")])
            for call in delta.get("tool_calls", ()):
                at = (index, call["index"])
                add((*at, "arguments"), call["function"]["arguments"])
                if "id" in call:
                    add((*at, "call"), [call["id"], call["function"]["name"]])
            for name, values in (choice.get("logprobs") or {}).items():
                if values is not None:
                    add((index, name), values)
    return said


BODIES = {
    "chat": (CHAT, {"messages": USER, "n": 2, "max_tokens": 40, "seed": 1, "stream_options": USAGE}),
    "logprobs and stops": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 60,
            "seed": 2,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "stop": ["e", "xy"],
            "min_tokens": 25,
            "frequency_penalty": 0.5,
            "priority": -1,
            "timeout_s": 60.0,
        },
    ),
    "tools": (
        CHAT,
        {"messages": USER, "max_tokens": 120, "seed": 3, "tools": [TOOL], "tool_choice": "required"},
    ),
    "prompts": (
        TEXT,
        {
            "prompt": ["one", "the second"],
            "n": 2,
            "max_tokens": 20,
            "seed": 4,
            "echo": True,
            "ignore_eos": True,
            "stream_options": USAGE,
        },
    ),
    "grammar": (
        TEXT,
        {
            "prompt": "x",
            "max_tokens": 50,
            "seed": 5,
            "guided_regex": "[a-z]{20,40}é+",
            "logit_bias": {"7": 2},
        },
    ),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("lost", [0, 9], ids=["", "last records lost"])
async def test_from_every_event_on_the_rest_follows(
    kind: str, lost: int, open_frontend: Opener, tmp_path: Path
) -> None:
    """A client that came back got a token twice, or half of a character, or a call with another id."""
    path, body = BODIES[kind]
    first = open_frontend(step_s=0.003)
    client = RawClient(small_app(first), path, body | {"stream": True})
    await until(lambda: client.body.count(b"\n\n") > 12)
    await killed(first, tmp_path)
    await client.task
    told = named_events(client.body.decode())
    whole = joined(told)
    assert whole["done"] == 1 and all(len(end) == 2 for key, end in whole.items() if key[1:] == ("end",))
    await until(lambda: first.journal is not None and first.journal.stats().num_requests == 0)
    if lost:
        records = list(read_records(tmp_path / "second"))
        admitted = max(at for at, record in enumerate(records) if b"admitted" in record)
        records = records[: max(admitted + 1, len(records) - lost)]  # on a busy machine they are few
        size = len(MAGIC) + sum(8 + len(record) for record in records)
        data = (tmp_path / "second" / JOURNAL).read_bytes()
        (tmp_path / "second" / JOURNAL).write_bytes(data[:size])

    second = open_frontend("second", max_num_batched_tokens=16)
    answer_id = told[0][1]["id"]
    named = [at for at, (name, _) in enumerate(told) if name is not None]
    assert len(named) > 12
    async with connected(small_app(second)) as http:
        for at in [-1, *named[:: 1 + len(named) // 12], *named[-3:]]:
            headers = {"last-event-id": str(told[at][0])} if at >= 0 else {}
            response = await http.get(f"/v1/requests/{answer_id}", headers=headers)
            assert response.status_code == 200, response.text
            assert response.headers["x-headrace-resumed"] == "exact"
            rest = named_events(response.text)
            assert all(data == "[DONE]" or data["id"] == answer_id for _, data in rest)
            assert joined(told[: at + 1] + rest) == whole, f"after event {at} ({told[at][0]})"
    assert idle(second)


async def test_a_whole_answer_by_the_name_of_its_request(open_frontend: Opener, tmp_path: Path) -> None:
    """A client that had not asked for a stream knew no id under which to come back."""
    first = open_frontend(step_s=0.003)
    headers = {"x-request-id": "mine-1", "authorization": "Bearer secret"}
    body = {"messages": USER, "max_tokens": 60, "seed": 1, "n": 2, "ignore_eos": True, "logprobs": True}
    client = RawClient(small_app(first, api_key="secret"), CHAT, body, headers)
    await until(lambda: first.client.stats().generation_tokens > 20)
    await killed(first, tmp_path)
    await client.task
    second = open_frontend("second")
    async with connected(small_app(second, api_key="secret")) as http:
        assert (await http.get("/v1/requests/mine-1")).status_code == 401
        assert (await http.get("/v1/requests/mine-2", headers=headers)).status_code == 404
        response = await http.get("/v1/requests/mine-1", headers=headers)
        assert response.json() == json.loads(client.body)


async def begun(first: Frontend, tmp_path: Path, headers: dict[str, str], **settings: Any) -> str:
    """Start a stream, die in the middle of it; the answer's id."""
    body = {"messages": USER, "max_tokens": 300, "seed": 1, "stream": True, "ignore_eos": True}
    client = RawClient(small_app(first, **settings), CHAT, body, headers)
    await until(lambda: client.body.count(b"\n\n") > 12)
    await killed(first, tmp_path)
    first.close()
    await client.task
    last = events(client.body.decode())[-1]
    assert last["error"]["code"] == "overloaded", "the client learns that its stream has been cut"
    return str(events(client.body.decode())[0]["id"])


async def test_nobody_gets_what_another_tenant_asked_for(open_frontend: Opener, tmp_path: Path) -> None:
    """Whoever guessed a request's name read its answer."""
    settings = {"gateway_credential": "g"}
    of_a = {"x-headrace-gateway": "g", "x-headrace-tenant": "a", "x-request-id": "one"}
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, of_a, **settings)
    second = open_frontend("second")
    async with connected(small_app(second, **settings)) as http:
        for name in (answer_id, "one"):
            for headers in ({}, of_a | {"x-headrace-tenant": "b"}, {"x-headrace-tenant": "a"}):
                refused = await http.get(f"/v1/requests/{name}", headers=headers)
                assert refused.status_code == 404
                assert refused.json()["error"]["code"] == "request_not_found"
                assert (await http.delete(f"/v1/requests/{name}", headers=headers)).status_code == 404
            wrong = of_a | {"x-headrace-gateway": "h"}
            assert (await http.get(f"/v1/requests/{name}", headers=wrong)).status_code == 401
            found = await http.get(f"/v1/requests/{name}", headers=of_a)
            assert events(found.text)[-1] == "[DONE]"


async def test_where_nobody_shows_who_he_is_names_are_not_enough(
    open_frontend: Opener, tmp_path: Path
) -> None:
    """On an open server request-1 was anybody's."""
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, {"x-request-id": "request-1"})
    async with connected(small_app(open_frontend("second"))) as http:
        for headers in ({}, {"x-headrace-gateway": "any", "authorization": "Bearer any"}):
            refused = await http.get("/v1/requests/request-1", headers=headers)
            assert refused.status_code == 404
            assert "without an API key" in refused.json()["error"]["message"]
        assert (await http.get(f"/v1/requests/{answer_id}")).status_code == 200


async def test_an_answer_can_be_given_up(open_frontend: Opener, tmp_path: Path) -> None:
    """What its user had stopped went on until its last token."""
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, {})
    second = open_frontend("second", step_s=0.05)
    async with connected(small_app(second)) as http:
        assert (await http.delete(f"/v1/requests/{answer_id}")).status_code == 204
        assert (await http.get(f"/v1/requests/{answer_id}")).status_code == 404
        await until(lambda: idle(second))
        assert second.journal is not None
        await until(lambda: second.journal.stats().num_requests == 0)


async def test_nobody_comes(open_frontend: Opener, tmp_path: Path) -> None:
    """Requests whose clients had gone for good were computed to their end after a restart."""
    await begun(open_frontend(step_s=0.003), tmp_path, {})
    second = open_frontend("second", step_s=0.05, grace_s=0.3)
    async with connected(small_app(second)) as http:
        assert (await http.get("/v1/requests/other")).status_code == 404
        await until(lambda: not idle(second))
        await until(lambda: idle(second))
        assert second.client.stats().generation_tokens < 100
        await until(lambda: second.journal.stats().num_requests == 0)
        metrics = (await http.get("/metrics")).text
        assert 'headrace_checkpoint_requests{model_name="small"} 0.0' in metrics
        assert 'headrace_checkpoint_broken{model_name="small"} 0.0' in metrics


async def test_a_client_that_leaves_again_may_come_again(open_frontend: Opener, tmp_path: Path) -> None:
    """A connection that broke a second time took the answer along."""
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, {})
    second = open_frontend("second", step_s=0.003)
    app = small_app(second)
    async with connected(app) as http:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await http.get(f"/v1/requests/{answer_id}")
        response = await http.get(f"/v1/requests/{answer_id}")
        assert len(joined(named_events(response.text))[0, "text"]) > 100
    assert app.state.server.in_flight == 0


async def test_after_an_update_only_what_was_saved_goes_on(open_frontend: Opener, tmp_path: Path) -> None:
    """The rest of an answer did not fit to its beginning, and nothing said so."""
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, {})
    second = open_frontend("second", fingerprint="newer")
    async with connected(small_app(second)) as http:
        path = f"/v1/requests/{answer_id}"
        response = await http.get(path, headers={"last-event-id": "3"})
        assert response.headers["x-headrace-resumed"] == "best-effort"
        assert events(response.text)[-1] == "[DONE]"
        refused = await http.get(path, headers={"last-event-id": "250"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_resumable")


async def test_ids_that_are_none(open_frontend: Opener, tmp_path: Path) -> None:
    """An id of another answer was taken for a position in this one."""
    answer_id = await begun(open_frontend(step_s=0.003), tmp_path, {})
    async with connected(small_app(open_frontend("second"))) as http:
        for wrong in ("1,2", "x", "-1", "1.5", "²", "9" * 30, ","):
            response = await http.get(f"/v1/requests/{answer_id}", headers={"last-event-id": wrong.encode()})
            assert response.status_code == 400, wrong
            assert "Last-Event-ID" in response.json()["error"]["message"]
        over = await http.get(f"/v1/requests/{answer_id}", headers={"last-event-id": "over"})
        assert over.text == "data: [DONE]\n\n"


async def test_what_ends_is_forgotten(open_frontend: Opener) -> None:
    """Answers that their clients had, or had left, stayed on the disk."""
    frontend = open_frontend(step_s=0.003)
    app = small_app(frontend)
    assert frontend.journal is not None
    body = {"messages": USER, "max_tokens": 300, "seed": 1, "ignore_eos": True}
    leaves = RawClient(app, CHAT, body | {"stream": True})
    await leaves.arrived.wait()
    await until(lambda: frontend.journal.stats().num_requests == 1)
    leaves.leave()
    await until(lambda: frontend.journal.stats().num_requests == 0)
    async with connected(app) as http:
        for kind in ({}, {"stream": True}, {"stop": ["a"], "n": 3}, {"timeout_s": 0.05}):
            await http.post(CHAT, json=body | {"max_tokens": 30} | kind)
        await until(lambda: frontend.journal.stats().num_requests == 0)
        searched = await http.post(CHAT, json=body | {"max_tokens": 5, "use_beam_search": True, "n": 2})
        assert searched.status_code == 200, "a search is not kept, and works"


async def test_without_a_journal_nothing_changes() -> None:
    """Every stream of every server had ids that nobody could use."""
    frontend = small_frontend()
    async with connected(small_app(frontend)) as http:
        body = {"messages": USER, "max_tokens": 5, "stream": True}
        assert "id: " not in (await http.post(CHAT, json=body)).text
        refused = await http.get("/v1/requests/x")
        assert refused.status_code == 404 and "--checkpoint-path" in refused.text
    frontend.close()


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_an_answer_that_another_server_began(route: str, open_frontend: Opener, tmp_path: Path) -> None:
    """What had gone on from another server was told again, or counted from its own first token."""
    first = open_frontend(step_s=0.003)
    body: dict[str, Any] = {
        "max_tokens": 90,
        "seed": 6,
        "ignore_eos": True,
        "stream": True,
        "resumable": True,
    }
    body |= {"messages": USER} if route == CHAT else {"prompt": "x", "logprobs": 1}
    body["stream_options"] = USAGE
    app = small_app(first)
    async with connected(app) as http:
        whole = joined(named_events((await http.post(route, json=body)).text))
        text = whole[0, "text"]
        elsewhere = named_events((await http.post(route, json=body)).text)
    fingerprint = elsewhere[0][1]["system_fingerprint"]
    ids = [
        token for _, data in elsewhere[:9] for each in data["choices"] for token in each.get("token_ids", ())
    ]
    body["resume"] = {"token_ids": ids, "system_fingerprint": fingerprint}
    client = RawClient(app, route, body)
    await until(lambda: client.body.count(b"\n\n") > 12)
    await killed(first, tmp_path)
    await client.task
    told = named_events(client.body.decode())
    rest = joined(told)
    assert text.endswith(rest[0, "text"]) and len(rest[0, "text"]) < len(text)
    assert rest["usage"][0]["completion_tokens"] == 90
    second = open_frontend("second")
    async with connected(small_app(second)) as http:
        for at in [-1, 0, 7, len(told) - 3]:
            headers = {"last-event-id": str(told[at][0])} if at >= 0 else {}
            response = await http.get(f"/v1/requests/{told[0][1]['id']}", headers=headers)
            assert joined(told[: at + 1] + named_events(response.text)) == rest, f"after event {at}"
