"""``headrace serve minilm-l6`` and the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from headrace import LLM
from tests.e2e.running import RunningServer, run, serving

MODEL = "minilm-l6"
TEXTS = ["A cat sleeps.", "The kitten naps.", "Interest rates rose.", "naïve café 🙂 日本語"]


@pytest.fixture(scope="module", params=["--engine-thread", "--engine-process"])
def server(
    request: pytest.FixtureRequest, minilm_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with serving(MODEL, request.param, log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_the_sdk_gets_vectors(sdk: openai.OpenAI, server: RunningServer) -> None:
    # The SDK asks for base64 unless told otherwise.
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS)
    plain = sdk.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    got = np.array([item.embedding for item in answer.data], np.float32)
    assert got.tobytes() == np.array([item.embedding for item in plain.data], np.float32).tobytes()
    assert got.shape == (4, 384)
    assert got[0] @ got[1] > got[0] @ got[2] + 0.3
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    assert answer.model == MODEL
    with LLM(MODEL) as llm:
        offline = [output.outputs.embedding for output in llm.embed(TEXTS[::-1])][::-1]
    assert np.array(offline, np.float32).tobytes() == got.tobytes()
    short = sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=64)
    assert len(short.data[0].embedding) == 64
    server.wait_idle()


def test_the_sdk_sees_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="502 tokens"):
        sdk.embeddings.create(model=MODEL, input="word " * 500)
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="smollm2-135m", input="word")


def test_the_printed_command_is_an_embedding(server: RunningServer) -> None:
    (command,) = (line for line in server.output if line.startswith("curl"))
    assert "/v1/embeddings" in command


def test_chat_with_an_encoder_is_one_clear_line(minilm_path: Path) -> None:
    done = run("chat", "-m", MODEL, text="Hello")
    assert done.returncode != 0
    assert "does not generate" in done.stderr
    assert "Traceback" not in done.stderr
