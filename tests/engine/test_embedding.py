"""The engine on an encoder: whole texts, a pool that empties after every step, one end for each request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine.build import CheckpointSpec, build_engine
from headrace.engine.client import EngineClient
from headrace.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.process_client import ProcessClient
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams
from headrace.engine.thread_client import ThreadClient
from headrace.errors import ConfigError, ContextLengthError, InvalidRequestError
from tests.engine.small_engines import assert_idle, small_engine
from tests.engine.small_engines import request as generation
from tests.model.tiny_bert import HIDDEN, MAX_POSITIONS, MAX_TOKENS, VOCAB, tiny_bert

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    tiny_bert(path)
    return path


def spec(
    folder: Path,
    *,
    max_model_len: int | None = None,
    kv_cache_memory_bytes: int = 2**26,
    **scheduler: Any,
) -> CheckpointSpec:
    return CheckpointSpec(
        path=str(folder),
        model=ModelConfig(model=str(folder), threads=1, max_model_len=max_model_len),
        cache=CacheConfig(kv_cache_memory_bytes=kv_cache_memory_bytes),
        scheduler=SchedulerConfig(**scheduler),
    )


def request(name: str, ids: list[int], *, priority: int = 0, **changes: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=ids,
        params=SamplingParams(),
        priority=priority,
        kind="embed",
        **changes,
    )


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def vector(output: EngineOutput) -> NDArray[np.float32]:
    assert output.vector is not None
    return np.frombuffer(output.vector, "<f4")


def steps(engine: Engine) -> list[list[EngineOutput]]:
    """The outputs of every step until nothing is left."""
    out = []
    while engine.has_work:
        out.append(engine.step())
        engine.kv_cache.check()
    assert_idle(engine)
    return out


def test_texts_share_steps_and_none_is_cut(folder: Path) -> None:
    engine = spec(folder, max_num_batched_tokens=100).build()
    lengths = [60, 30, 20, 80, 1]
    for index, length in enumerate(lengths):
        engine.add(request(str(index), ids(length, index)))
    done = steps(engine)
    # The third text would have been the 101st token and more: it waits, and nobody overtakes it.
    assert [[output.request_id for output in step] for step in done] == [["0", "1"], ["2", "3"], ["4"]]
    for output in chain(*done):
        assert (output.finish_reason, output.token_ids, len(vector(output))) == ("stop", [], HIDDEN)
        assert output.first_scheduled_time is not None
        assert output.first_token_time is not None
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_preemptions) == (sum(lengths), 0, 0)
    engine.close()


def test_a_vector_is_the_same_alone_and_among_others(folder: Path) -> None:
    engine = spec(folder).build()
    alone = {}
    for index in range(12):
        engine.add(request(f"a{index}", ids(3 + 5 * index, index)))
        ((output,),) = steps(engine)
        alone[index] = output.vector
    for index in reversed(range(12)):
        engine.add(request(f"b{index}", ids(3 + 5 * index, index)))
    together = {int(output.request_id[1:]): output.vector for output in chain(*steps(engine))}
    assert together == alone
    engine.close()


def test_equal_beginnings_share_nothing(folder: Path) -> None:
    """A text's K and V depend on what follows: reusing another's would give a wrong vector."""
    engine = spec(folder).build()
    start = ids(48)
    results = []
    for tail in ([5] * 20, [6] * 20, [5] * 20):
        engine.add(request("x", start + tail))
        ((output,),) = steps(engine)
        assert output.num_cached_tokens == 0
        results.append(output.vector)
    assert results[0] == results[2] != results[1]
    engine.close()


def test_a_tiny_pool_serves_many_texts(folder: Path) -> None:
    block = 2 * 2 * 64 * 16 * 3
    engine = spec(folder, kv_cache_memory_bytes=5 * block).build()
    assert engine.kv_cache.num_blocks == 5
    assert engine.limits.max_model_len == 80
    for index in range(20):
        engine.add(request(str(index), ids(80 - 4 * index, index)))
    outputs = chain(*steps(engine))
    assert sorted(int(output.request_id) for output in outputs) == list(range(20))
    engine.close()


def test_the_pool_is_no_larger_than_a_step_can_use(folder: Path) -> None:
    engine = spec(folder, max_num_batched_tokens=128, max_num_seqs=4).build()
    assert engine.kv_cache.num_blocks == 128 // 16 + 4 + 1
    engine.close()


def test_priorities_and_aborts(folder: Path) -> None:
    engine = spec(folder, max_num_seqs=1).build()
    for name, priority in (("late", 5), ("early", -5), ("gone", 0), ("middle", 0)):
        engine.add(request(name, ids(9), priority=priority))
    (aborted,) = engine.abort("gone")
    assert (aborted.finish_reason, aborted.vector) == ("abort", None)
    order = [output.request_id for step in steps(engine) for output in step]
    assert order == ["early", "middle", "late"]
    engine.close()


def test_what_cannot_be_served_is_refused(folder: Path) -> None:
    engine = spec(folder).build()
    assert engine.limits.max_model_len == MAX_TOKENS
    engine.add(request("fits", ids(MAX_TOKENS)))
    with pytest.raises(ContextLengthError, match=rf"{MAX_TOKENS} tokens.* has {MAX_TOKENS + 1}"):
        engine.add(request("long", ids(MAX_TOKENS + 1)))
    with pytest.raises(InvalidRequestError, match="embeds texts, it does not generate"):
        engine.add(generation("wrong", [1]))
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        engine.add(
            EngineRequest(request_id="n", prompt_token_ids=[1], params=SamplingParams(n=2), kind="embed")
        )
    with pytest.raises(InvalidRequestError, match="generates text, it does not embed"):
        small_engine().add(request("wrong", [1]))
    assert len(list(chain(*steps(engine)))) == 1
    engine.close()


def test_longer_texts_have_to_be_asked_for(folder: Path) -> None:
    engine = spec(folder, max_model_len=1000).build()
    assert engine.limits.max_model_len == MAX_POSITIONS
    engine.close()
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 40.*80 tokens"):
        spec(folder, max_num_batched_tokens=40).build()


def test_a_text_with_broken_numbers_fails_alone(tmp_path: Path) -> None:
    model = tiny_bert(tmp_path)
    model.embeddings.word_embeddings.weight.data[9] = float("nan")
    model.save_pretrained(tmp_path)
    engine = spec(tmp_path).build()
    for name, token in (("good", 8), ("bad", 9), ("fine", 7)):
        engine.add(request(name, [token, 8]))
    ends = {output.request_id: output for output in chain(*steps(engine))}
    engine.close()
    assert (ends["bad"].finish_reason, ends["bad"].error_kind) == ("error", "GenerationError")
    assert ends["bad"].vector is None
    assert np.isfinite(vector(ends["good"])).all()
    assert np.isfinite(vector(ends["fine"])).all()


def test_the_torch_backend_agrees(folder: Path) -> None:
    vectors = []
    for backend in ("cpu", "torch"):
        model = ModelConfig(model=str(folder), threads=1, backend=backend)  # type: ignore[arg-type]
        engine = build_engine(folder, model, CacheConfig(), SchedulerConfig())
        engine.add(request("x", ids(50)))
        ((output,),) = steps(engine)
        vectors.append(vector(output))
        engine.close()
    assert float(vectors[0] @ vectors[1]) > 0.9995


@pytest.fixture(params=["thread", "process"])
def client(request: pytest.FixtureRequest, folder: Path) -> Iterator[EngineClient]:
    made = spec(folder)
    client: EngineClient = ThreadClient(made.build()) if request.param == "thread" else ProcessClient(made)
    yield client
    client.close()


def test_clients_deliver_vectors(client: EngineClient, folder: Path) -> None:
    assert client.architecture.encoder is not None
    got: dict[str, EngineOutput] = {}
    all_done = threading.Event()

    def sink(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in got
            got[output.request_id] = output
        if len(got) == 40:
            all_done.set()

    for index in range(40):
        client.submit(request(str(index), ids(1 + 2 * index, index)), sink)
    assert all_done.wait(30)
    engine = spec(folder).build()
    engine.add(request("x", ids(41, 20)))
    ((alone,),) = steps(engine)
    engine.close()
    assert alone.vector == got["20"].vector
    with pytest.raises(InvalidRequestError, match="does not generate"):
        client.submit(generation("wrong", [1]), sink)
    with pytest.raises(ContextLengthError):
        client.submit(request("long", ids(MAX_TOKENS + 1)), sink)
