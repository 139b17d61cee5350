"""The torch runner against transformers: every architecture, whole prompts, chunks, batches of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Float32
from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import open_torch_runner, reference_logits
from headrace.backend.torch.runner import TorchRunner
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import Piece, batch_of, single_batch
from tests.model.tiny import CASES

NUM_BLOCKS = 24
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A tiny model in both implementations, and transformers' answer for one prompt."""

    checkpoint: SafetensorsCheckpoint
    model: Any
    runner: TorchRunner
    prompt: list[int]
    expected: Float32

    @property
    def groups(self) -> int:
        return len(self.checkpoint.architecture.kv_groups)


def transformers_logits(model: Any, token_ids: list[int]) -> Float32:
    with torch.no_grad():
        logits: Float32 = model(input_ids=torch.tensor([token_ids])).logits[0].float().numpy()
    return logits


def settings(**changes: Any) -> RunnerSettings:
    sizes = {"num_blocks": NUM_BLOCKS, "max_batch_tokens": 256, "max_sequences": 8, "max_model_len": 256}
    return RunnerSettings(**{**sizes, **changes})


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = CASES[request.param](folder)
    checkpoint = SafetensorsCheckpoint(folder)
    prompt = np.random.default_rng(7).integers(0, 298, 75).tolist()
    runner = open_torch_runner(checkpoint, settings())
    return Case(checkpoint, model, runner, prompt, transformers_logits(model, prompt))


def shuffled_blocks(seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)


def test_whole_sequence(case: Case) -> None:
    """The oracle: every position's logits of a prompt longer than any window."""
    got = reference_logits(case.checkpoint, case.prompt)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, case.expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 75])
def test_chunks_through_shuffled_blocks(case: Case, chunk: int) -> None:
    """Chunked prefill and decode read back what earlier steps wrote, wherever the blocks lie."""
    blocks = shuffled_blocks(chunk)[: -(-len(case.prompt) // BLOCK_SIZE)].tolist()
    rows = []
    for start in range(0, len(case.prompt), chunk):
        tokens = case.prompt[start : start + chunk]
        used = blocks[: -(-(start + len(tokens)) // BLOCK_SIZE)]
        rows.append(case.runner.logits(single_batch(tokens, start, used, "all", case.groups)))
    np.testing.assert_allclose(np.concatenate(rows), case.expected, atol=TOLERANCE, rtol=0)


def test_several_sequences_in_one_batch(case: Case) -> None:
    """Prefill, a later chunk and single-token decode side by side do not see each other."""
    order = shuffled_blocks(3).tolist()
    whole, chunked, decoded = case.prompt[:40], case.prompt[20:61], case.prompt[5:31]
    blocks = [order[:3], order[3:6], order[6:8]]
    first = [Piece(chunked[:23], 0, blocks[1]), Piece(decoded[:-1], 0, blocks[2])]
    case.runner.logits(batch_of(first, "last", case.groups))
    second = [Piece(whole, 0, blocks[0]), Piece(chunked[23:], 23, blocks[1])]
    second.append(Piece(decoded[-1:], len(decoded) - 1, blocks[2]))
    got = case.runner.logits(batch_of(second, "last", case.groups))
    expected = [transformers_logits(case.model, tokens)[-1] for tokens in (whole, chunked, decoded)]
    np.testing.assert_allclose(got, np.stack(expected), atol=TOLERANCE, rtol=0)


def test_run_samples_greedily(case: Case) -> None:
    """run() is logits() and the sampler: greedy generation equals transformers' argmax, token by token."""
    blocks = shuffled_blocks(5)[:3].tolist()
    tokens = case.prompt[:20]
    got, start = [], 0
    sequence = list(tokens)
    for _ in range(5):
        step = sequence[start:]
        result = case.runner.run(single_batch(step, start, blocks, "last", case.groups))
        assert not result.failed.any()
        start = len(sequence)
        sequence.append(int(result.token_ids[0]))
        got.append(sequence[-1])
    expected = list(tokens)
    for _ in got:
        expected.append(int(transformers_logits(case.model, expected)[-1].argmax()))
    assert got == expected[len(tokens) :]
