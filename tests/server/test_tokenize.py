"""``/tokenize`` and ``/detokenize`` from outside: shapes as vLLM's, the same tokens as the server reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.frontend.frontend import Frontend
from tests.server.small_server import EOS, MAX_MODEL_LEN, connected, small_app, small_frontend

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    made = small_frontend()
    yield made
    made.close()


@pytest.fixture
def app(frontend: Frontend) -> Any:
    return small_app(frontend)


async def post(app: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    async with connected(app) as client:
        return await client.post(path, content=json.dumps(body), headers=headers)


async def test_a_prompt_there_and_back(app: Any) -> None:
    answer = await post(app, "/tokenize", {"model": "small", "prompt": "hé<end>"})
    body = answer.json()
    assert answer.status_code == 200
    assert list(body) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (body["count"], body["max_model_len"], body["token_strs"]) == (4, MAX_MODEL_LEN, None)
    assert body["tokens"][-1] == EOS
    back = await post(app, "/detokenize", {"model": "small", "tokens": body["tokens"]})
    assert back.json() == {"prompt": "hé<end>"}
    assert (await post(app, "/detokenize", {"tokens": []})).json() == {"prompt": ""}
    told = await post(app, "/tokenize", {"prompt": "h<end>", "return_token_strs": True})
    assert told.json()["token_strs"] == ["h", "<end>"]


async def test_a_chat_is_counted_as_it_is_read(app: Any) -> None:
    for more in ({}, {"add_generation_prompt": False}):
        counted = (await post(app, "/tokenize", {"messages": USER, **more})).json()
        asked = {"messages": USER, "max_tokens": 1, **more}
        usage = (await post(app, "/v1/chat/completions", asked)).json()["usage"]
        assert counted["count"] == len(counted["tokens"]) == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "\ud800"}, None),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {"tokens": [1, EOS + 1]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_wrong_is_said(app: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    refused = await post(app, path, body)
    assert refused.status_code == 400, refused.text
    assert param is None or refused.json()["error"]["param"] == param


async def test_the_key_and_the_model_are_asked_for(frontend: Frontend) -> None:
    app = small_app(frontend, api_key="secret")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await post(app, path, body)).status_code == 401
        assert (await post(app, path, body, authorization="Bearer secret")).status_code == 200
        body["model"] = "other"
        assert (await post(app, path, body, authorization="Bearer secret")).status_code == 404
