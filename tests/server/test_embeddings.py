"""``/v1/embeddings`` from outside, over a tiny real encoder: shapes, limits, refusals, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.frontend.frontend import Frontend
from headrace.frontend.open import open_frontend
from headrace.server.documentation import _BODIES
from tests.model.tiny_bert import HIDDEN, MAX_TOKENS, tiny_bert
from tests.server.small_server import RawClient, connected, idle, small_app, small_frontend, until

pytestmark = [pytest.mark.anyio, pytest.mark.native]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    tiny_bert(path)
    return path


def encoder_frontend(folder: Path, **scheduler: Any) -> Frontend:
    made = open_frontend(
        ModelConfig(model=str(folder), threads=1), CacheConfig(), SchedulerConfig(**scheduler)
    )
    made.model_name = "tiny"
    return made


@pytest.fixture(scope="module")
def frontend(folder: Path) -> Iterator[Frontend]:
    made = encoder_frontend(folder)
    yield made
    made.close()


@pytest.fixture
def app(frontend: Frontend) -> Any:
    return small_app(frontend, max_inputs=100)


async def post(app: Any, body: Any, path: str = PATH) -> httpx.Response:
    async with connected(app) as client:
        return await client.post(path, json=body)


async def vectors(app: Any, body: dict[str, Any]) -> list[Any]:
    response = await post(app, body)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


async def test_the_answer_has_the_shape_of_openai(app: Any) -> None:
    response = await post(app, {"model": "tiny", "input": ["ab c", "d"], "user": "somebody"})
    body = response.json()
    assert list(body) == ["data", "model", "usage", "object"]
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert [item["object"] for item in body["data"]] == ["embedding"] * 2
    assert [item["index"] for item in body["data"]] == [0, 1]
    assert all(len(item["embedding"]) == HIDDEN for item in body["data"])
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    assert response.headers["content-type"] == "application/json"


async def test_all_forms_of_input_mean_the_same(app: Any, frontend: Frontend) -> None:
    ids = frontend.encode_prompt("ab c")
    other = frontend.encode_prompt("xyz")
    (one,) = await vectors(app, {"input": "ab c"})
    assert await vectors(app, {"input": ids}) == [one]
    both = await vectors(app, {"input": ["ab c", "xyz"]})
    assert both[0] == one
    assert await vectors(app, {"input": [ids, other]}) == both


async def test_base64_holds_the_same_floats(app: Any) -> None:
    numbers = await vectors(app, {"input": ["ab", "cd"]})
    texts = await vectors(app, {"input": ["ab", "cd"], "encoding_format": "base64"})
    for text, values in zip(texts, numbers, strict=True):
        assert np.frombuffer(base64.b64decode(text), "<f4").tobytes() == np.float32(values).tobytes()


async def test_dimensions(app: Any) -> None:
    (whole,) = await vectors(app, {"input": "ab"})
    (cut,) = await vectors(app, {"input": "ab", "dimensions": 4})
    np.testing.assert_allclose(cut, np.array(whole[:4]) / np.linalg.norm(whole[:4]), rtol=1e-5)


async def test_truncation_is_counted(app: Any) -> None:
    body = (await post(app, {"input": "a " * 500, "truncate_prompt_tokens": -1})).json()
    assert body["usage"]["prompt_tokens"] == MAX_TOKENS
    body = (await post(app, {"input": "a " * 500, "truncate_prompt_tokens": 7})).json()
    assert body["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", ""),
        ({"input": ["a", ""]}, "input", "input[1]"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a", 3]}, "input", "strings only"),
        ({"input": None}, "input", "expected"),
        ({"input": {"text": "a"}}, "input", "expected"),
        ({"input": [-1]}, "input", ""),
        ({"input": [[5, 300]]}, "input", "vocabulary"),
        ({"input": ["a"] * 101}, "input", "at most 100"),
        ({"input": "\ud800"}, None, "not valid JSON"),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions", f"from 1 to {HIDDEN}"),
        ({"input": "a", "dimensions": "8"}, "dimensions", "integer"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"input": "a", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens", f"{MAX_TOKENS}"),
        ({"input": "a b", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "no room"),
        ({"input": "a", "dimension": 8}, "dimension", "did you mean `dimensions`"),
        ({"input": "a", "stream": True}, "stream", "unknown"),
    ],
)
async def test_bad_input_is_told_what_is_wrong(app: Any, body: Any, param: str, words: str) -> None:
    async with connected(app) as client:
        response = await client.post(PATH, content=json.dumps(body).encode())
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


async def test_too_long_a_text_gets_both_counts(app: Any) -> None:
    response = await post(app, {"input": ["a", "a " * 200]})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "202 tokens" in error["message"]
    assert str(MAX_TOKENS) in error["message"]
    assert "input[1]" in error["message"]


async def test_models_are_asked_for_what_they_do(app: Any) -> None:
    message = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/completions", {"prompt": "hi", "echo": True}),
        ("/v1/completions", {"prompt": [5, 6], "stream": True, "echo": True}),
    ):
        response = await post(app, body, path)
        assert response.status_code == 400
        assert "does not generate" in response.json()["error"]["message"]
    decoder = small_frontend()
    response = await post(small_app(decoder), {"input": "hi"})
    decoder.close()
    assert response.status_code == 400
    assert "does not embed" in response.json()["error"]["message"]
    assert (await post(app, {"input": "a", "model": "other"})).status_code == 404


async def test_a_full_queue_is_503(folder: Path) -> None:
    frontend = encoder_frontend(folder, max_waiting=1, max_num_seqs=1, max_queue_time_s=0.0)
    response = await post(small_app(frontend), {"input": ["a"] * 50})
    frontend.close()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert "retry-after" in response.headers


async def test_more_inputs_than_may_wait(folder: Path) -> None:
    frontend = encoder_frontend(folder, max_waiting=2, max_num_seqs=1)
    assert len(await vectors(small_app(frontend), {"input": ["ab"] * 90})) == 90
    assert idle(frontend)
    frontend.close()


async def test_whoever_leaves_frees_what_they_held(folder: Path) -> None:
    frontend = encoder_frontend(folder, max_num_seqs=1)
    app = small_app(frontend)
    client = RawClient(app, PATH, {"input": [[5] * MAX_TOKENS] * 2000})
    await until(lambda: frontend.client.stats().num_steps > 3)
    client.leave()
    await asyncio.wait_for(client.task, 60.0)
    await until(lambda: idle(frontend))
    assert frontend.client.stats().num_steps < 2000
    assert client.status is None
    assert len(await vectors(app, {"input": "ab"})) == 1
    frontend.close()


async def test_a_dead_engine_is_503(folder: Path) -> None:
    frontend = encoder_frontend(folder)
    app = small_app(frontend)
    frontend.close()
    response = await post(app, {"input": "ab"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


async def test_a_text_with_broken_numbers_is_500(tmp_path: Path) -> None:
    model = tiny_bert(tmp_path)
    model.embeddings.word_embeddings.weight.data[9] = float("nan")
    model.save_pretrained(tmp_path)
    frontend = encoder_frontend(tmp_path)
    app = small_app(frontend)
    response = await post(app, {"input": [[8], [9]]})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    assert len(await vectors(app, {"input": [8]})) == 1
    assert idle(frontend)
    frontend.close()


async def test_metrics_and_documentation(app: Any) -> None:
    async with connected(app) as client:

        async def value(name: str) -> float:
            page = (await client.get("/metrics")).text
            return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

        await client.post(PATH, json={"input": ["ab", "c"]})
        assert await value("headrace_request_prompt_tokens_count") == 1
        assert await value('vllm:request_success_total{finished_reason="stop"') == 2
        assert await value("vllm:e2e_request_latency_seconds_count") == 1
        assert await value("vllm:request_queue_time_seconds_count") == 2
        assert await value('headrace_http_requests_total{route="/v1/embeddings",status="200"}') == 1
        schema = (await client.get("/openapi.json")).json()
    assert PATH in _BODIES
    route = schema["paths"][PATH]["post"]
    assert "EmbeddingRequest" in json.dumps(route["requestBody"])
    assert "EmbeddingList" in json.dumps(route["responses"]["200"])
    assert set(schema["components"]["schemas"]) >= {"EmbeddingRequest", "EmbeddingList", "Embedding"}


async def test_loading_is_timed_from_the_first_look_into_the_files(folder: Path) -> None:
    """It was timed from when the server began to wait for the weights; what they had taken was lost."""
    began = time.monotonic()
    frontend = encoder_frontend(folder)
    time.sleep(0.1)  # loaded before anybody waits for it
    async with connected(small_app(frontend)) as client:
        elapsed = time.monotonic() - began
        page = (await client.get("/metrics")).text
    frontend.close()
    [seconds] = re.findall(r"^headrace_model_load_seconds\{[^}]*\} (\S+)$", page, re.MULTILINE)
    assert 0.1 < float(seconds) < elapsed
