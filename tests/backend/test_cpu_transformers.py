"""The cpu runner on whole tiny models: right against transformers, and the same bits however it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.backend.batch import BLOCK_SIZE, Float32
from headrace.backend.cpu.runner import CpuRunner, open_cpu_runner
from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import reference_logits
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import Piece, batch_of, single_batch
from tests.model.tiny import CASES

pytestmark = pytest.mark.native

NUM_BLOCKS = 24

# What keys and values in bf16 and, below float32, activations in bf16 or int8 cost these random networks: the
# largest and the mean difference, relative to the mean logit. Measured over all cases: at most 0.14 and 0.011
# with float32 weights, 0.21 and 0.016 with bf16, 0.46 and 0.039 with integers. A window off by one, the
# mildest mistake of structure, makes the largest difference 0.74 … 7.
TOLERANCE = {
    "float32": (0.2, 0.014),
    "bfloat16": (0.3, 0.02),
    "int8": (0.6, 0.06),
    "int4": (0.6, 0.06),
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint in each of the ways that weights can be held, and what its logits should be."""

    checkpoints: dict[str, SafetensorsCheckpoint]
    expected: dict[str, Float32]
    prompt: list[int]

    @property
    def groups(self) -> int:
        return len(self.checkpoints["float32"].architecture.kv_groups)


def transformers_logits(model: Any, token_ids: list[int]) -> Float32:
    with torch.no_grad():
        logits: Float32 = model(input_ids=torch.tensor([token_ids])).logits[0].float().numpy()
    return logits


@pytest.fixture(scope="module", params=CASES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    narrow: Path = tmp_path_factory.mktemp(f"{request.param}-bf16")
    model = CASES[request.param](folder)
    prompt = np.random.default_rng(7).integers(0, 298, 75).tolist()
    expected = {"float32": transformers_logits(model, prompt)}
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    (narrow / "config.json").write_bytes((folder / "config.json").read_bytes())
    expected["bfloat16"] = transformers_logits(model.bfloat16().float(), prompt)
    checkpoints = {
        "float32": SafetensorsCheckpoint(folder),
        "bfloat16": SafetensorsCheckpoint(narrow),
        "int8": SafetensorsCheckpoint(folder, quantization="int8"),
        "int4": SafetensorsCheckpoint(folder, quantization="int4"),
    }
    for kind in ("int8", "int4"):  # the float32 oracle on the same rounded weights
        expected[kind] = reference_logits(checkpoints[kind], prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Tiny(checkpoints, expected, prompt)


def open_runner(tiny: Tiny, mode: str, isa: str, threads: int = 1) -> CpuRunner:
    settings = RunnerSettings(
        num_blocks=NUM_BLOCKS, max_batch_tokens=128, max_sequences=128, max_model_len=128, threads=threads
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ISA", isa)
        return open_cpu_runner(tiny.checkpoints[mode], settings)


def whole(tiny: Tiny, runner: CpuRunner, chunk: int, seed: int = 1) -> Float32:
    """All logits of the prompt, ``chunk`` tokens a step, through blocks in random order."""
    needed = -(-len(tiny.prompt) // BLOCK_SIZE)
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS)[:needed].tolist()
    rows = []
    for start in range(0, len(tiny.prompt), chunk):
        tokens = tiny.prompt[start : start + chunk]
        used = blocks[: -(-(start + len(tokens)) // BLOCK_SIZE)]
        rows.append(runner.logits(single_batch(tokens, start, used, "all", tiny.groups)))
    return np.concatenate(rows)


@pytest.mark.parametrize("mode", TOLERANCE)
def test_logits(tiny: Tiny, mode: str, isa: str) -> None:
    """Every position of a prompt longer than any window."""
    runner = open_runner(tiny, mode, isa)
    assert runner.capabilities.isa == isa
    error = np.abs(whole(tiny, runner, len(tiny.prompt)) - tiny.expected[mode])
    largest, mean = TOLERANCE[mode]
    scale = np.abs(tiny.expected[mode]).mean()
    assert error.max() < largest * scale
    assert error.mean() < mean * scale


def test_the_same_bits_in_any_chunks_company_and_threads(tiny: Tiny, isa: str) -> None:
    """The promise of batch invariance, on every architecture."""
    mode = "int4"
    runner = open_runner(tiny, mode, isa)
    assert runner.capabilities.batch_invariant
    alone = whole(tiny, runner, len(tiny.prompt))
    for chunk in (1, 7, 16):
        np.testing.assert_array_equal(whole(tiny, runner, chunk, seed=chunk), alone)

    # A whole prompt, a later chunk and a decode side by side.
    prompt, order = tiny.prompt, np.random.default_rng(3).permutation(NUM_BLOCKS).tolist()
    blocks = [order[:5], order[5:10], order[10:15]]
    first = [Piece(prompt[:23], 0, blocks[1]), Piece(prompt[:40], 0, blocks[2])]
    runner.logits(batch_of(first, "last", tiny.groups))
    second = [
        Piece(prompt, 0, blocks[0]),
        Piece(prompt[23:60], 23, blocks[1]),
        Piece([prompt[40]], 40, blocks[2]),
    ]
    mixed = batch_of(second, "all", tiny.groups)
    together = runner.logits(mixed)
    np.testing.assert_array_equal(together, np.concatenate([alone, alone[23:60], alone[40:41]]))

    for threads in (2, 3):
        threaded = open_runner(tiny, mode, isa, threads)
        threaded.logits(batch_of(first, "last", tiny.groups))
        np.testing.assert_array_equal(threaded.logits(mixed), together)
        threaded.close()
