"""Encoders on both backends: transformers' vectors, and the same bits whatever else is in the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.backend import open_runner
from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.runner import Runner, RunnerSettings
from headrace.errors import ConfigError
from headrace.model.weights import open_checkpoint
from tests.backend.batches import Piece, batch_of
from tests.model.tiny_bert import MAX_POSITIONS, VOCAB, reference, tiny_bert

LENGTHS = (1, 2, 15, 16, 17, 40, MAX_POSITIONS)
BLOCKS = 64
CPU = pytest.param("cpu", marks=pytest.mark.native)


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def runner(folder: Path, backend: str, threads: int = 1, quantization: Any = None) -> Runner:
    settings = RunnerSettings(
        num_blocks=BLOCKS, max_batch_tokens=256, max_sequences=8, max_model_len=MAX_POSITIONS, threads=threads
    )
    return open_runner(open_checkpoint(folder, quantization=quantization), backend, settings)


def vectors(runner: Runner, inputs: list[list[int]], first_block: int = 0) -> NDArray[np.float32]:
    """One step over all inputs; blocks are handed out from ``first_block`` on, downwards and around."""
    pieces, block = [], first_block
    for ids in inputs:
        count = -(-len(ids) // BLOCK_SIZE)
        pieces.append(Piece(ids, 0, [(block - i) % BLOCKS for i in range(count)]))
        block -= count
    result = runner.run(batch_of(pieces))
    assert result.vectors is not None
    assert not result.failed.any()
    return result.vectors


@pytest.mark.parametrize("backend", ["torch", CPU])
@pytest.mark.parametrize(
    ("pooling", "normalize", "changes"),
    [
        ("mean", True, {}),
        ("cls", True, {}),
        ("mean", False, {"hidden_act": "gelu_new"}),
        ("mean", True, {"hidden_act": "silu", "num_attention_heads": 2}),
        ("mean", True, {"hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 50}),
    ],
)
def test_equals_transformers(
    backend: str, pooling: str, normalize: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_bert(tmp_path, pooling=pooling, normalize=normalize, **changes)
    if "hidden_size" in changes:
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    want = reference(model, texts(), pooling=pooling, normalize=normalize)
    opened = runner(tmp_path, backend)
    got = vectors(opened, texts())
    opened.close()
    assert got.shape == want.shape
    # The native KV cache is bfloat16.
    tolerance = 1e-5 if backend == "torch" else 0.02
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())
    cosine = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert cosine.min() > 0.9995


@pytest.mark.native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_bits_do_not_depend_on_neighbours_blocks_or_threads(quantization: Any, tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    inputs = texts()
    opened = runner(tmp_path, "cpu", quantization=quantization)
    together = vectors(opened, inputs)
    for index, ids in enumerate(inputs):
        assert vectors(opened, [ids], 5 * index).tobytes() == together[index].tobytes()
    backwards = vectors(opened, inputs[::-1], 40)
    assert backwards[::-1].tobytes() == together.tobytes()
    threaded = runner(tmp_path, "cpu", threads=3, quantization=quantization)
    assert vectors(threaded, inputs).tobytes() == together.tobytes()
    for each in (opened, threaded):
        each.close()


@pytest.mark.native
def test_every_token_sees_those_behind_it(tmp_path: Path) -> None:
    tiny_bert(tmp_path, pooling="cls")
    opened = runner(tmp_path, "cpu")
    first, second = vectors(opened, [[5, 6, 7, 8], [5, 6, 7, 9]])
    opened.close()
    assert np.abs(first - second).max() > 0.01


@pytest.mark.native
def test_the_text_with_broken_numbers_is_named(tmp_path: Path) -> None:
    model = tiny_bert(tmp_path)
    model.embeddings.word_embeddings.weight.data[9, 3] = float("nan")
    model.save_pretrained(tmp_path)
    opened = runner(tmp_path, "cpu")
    result = opened.run(batch_of([Piece([8, 9], 0, [0]), Piece([8], 0, [1])]))
    opened.close()
    assert result.failed.tolist() == [True, False]


@pytest.mark.native
def test_more_positions_than_the_table_has_are_refused(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    settings = RunnerSettings(BLOCKS, 256, 8, max_model_len=MAX_POSITIONS + 1)
    with pytest.raises(ConfigError, match=f"only {MAX_POSITIONS} positions"):
        open_runner(open_checkpoint(tmp_path), "cpu", settings)
