"""Keys and values in int8, in whole models: as right as torch's, and the same bits in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backend.batch import BLOCK_SIZE, Float32
from headrace.backend.cpu.runner import open_cpu_runner
from headrace.backend.kv_format import KV_CACHE_DTYPES, KVCacheDtype
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import simulated_architecture
from headrace.backend.torch import open_torch_runner
from headrace.backend.torch.kv import TorchKV
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import Piece, batch_of, single_batch
from tests.backend.cpu_kernels import POOLS
from tests.model.tiny import CASES

pytestmark = pytest.mark.native

NUM_BLOCKS = 24
SETTINGS = RunnerSettings(
    num_blocks=NUM_BLOCKS,
    max_batch_tokens=128,
    max_sequences=128,
    max_model_len=128,
    threads=1,
    kv_cache_dtype="int8",
)
PROMPT: list[int] = np.random.default_rng(7).integers(0, 298, 75).tolist()
ORDER: list[int] = np.random.default_rng(3).permutation(NUM_BLOCKS).tolist()


@pytest.fixture(scope="module", params=["gemma3-softcap", "smollm2", "mistral"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SafetensorsCheckpoint]:
    """Windows, q/k norms, four heads a KV head; three of odd widths; a window over everything."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    CASES[request.param](folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield SafetensorsCheckpoint(folder)


def logits(runner: Any, chunk: int = len(PROMPT)) -> Float32:
    """All logits of the prompt, ``chunk`` tokens a step."""
    groups, rows = len(runner.architecture.kv_groups), []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        blocks = ORDER[: -(-(start + len(tokens)) // BLOCK_SIZE)]
        rows.append(runner.logits(single_batch(tokens, start, blocks, "all", groups)))
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_as_torch_with_the_same_rounding(
    checkpoint: SafetensorsCheckpoint, isa: str, dtype: KVCacheDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the format costs is in both; what is left is the order of sums and, rarely, the next code."""
    monkeypatch.setenv("HEADRACE_ISA", isa)
    settings = dataclasses.replace(SETTINGS, kv_cache_dtype=dtype)
    native, oracle = open_cpu_runner(checkpoint, settings), open_torch_runner(checkpoint, settings)
    plain = open_torch_runner(checkpoint, dataclasses.replace(settings, kv_cache_dtype="auto"))
    assert native.capabilities.kv_dtype == oracle.capabilities.kv_dtype == dtype
    got, expected, exact = logits(native), logits(oracle), logits(plain)
    scale = np.abs(exact).mean()
    error, cost = np.abs(got - expected).mean() / scale, np.abs(expected - exact).mean() / scale
    print(f"{isa} {dtype}: {error:.5f} from the oracle, which is {cost:.5f} from float32")
    assert 0 < cost < 0.05
    assert error < 0.01 if isa in ("avx512_bf16", "avx512_amx") and dtype == "bfloat16" else error < cost / 2


def test_the_same_bits_in_any_chunks_company_and_threads(
    checkpoint: SafetensorsCheckpoint, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ISA", isa)
    runner, groups = open_cpu_runner(checkpoint, SETTINGS), len(checkpoint.architecture.kv_groups)
    alone = logits(runner)
    for chunk in (1, 7, 16):
        np.testing.assert_array_equal(logits(runner, chunk), alone)
    blocks = [ORDER[:5], ORDER[5:10], ORDER[10:15]]
    first = [Piece(PROMPT[:23], 0, blocks[1]), Piece(PROMPT[:40], 0, blocks[2])]
    second = [
        Piece(PROMPT, 0, blocks[0]),
        Piece(PROMPT[23:60], 23, blocks[1]),
        Piece([PROMPT[40]], 40, blocks[2]),
    ]
    for threads in (1, 2, 3):
        threaded = open_cpu_runner(checkpoint, dataclasses.replace(SETTINGS, threads=threads))
        threaded.logits(batch_of(first, "last", groups))
        together = threaded.logits(batch_of(second, "all", groups))
        np.testing.assert_array_equal(together, np.concatenate([alone, alone[23:60], alone[40:41]]))


def test_another_format_is_another_fingerprint(checkpoint: SafetensorsCheckpoint) -> None:
    """Tokens of one format continue no text of another; "auto" is bfloat16 by another name."""
    for open_runner, kept in ((open_cpu_runner, "bfloat16"), (open_torch_runner, "float32")):
        said = {
            dtype: open_runner(checkpoint, dataclasses.replace(SETTINGS, kv_cache_dtype=dtype)).capabilities
            for dtype in KV_CACHE_DTYPES
        }
        assert said["auto"].kv_dtype == kept
        same = said["auto"].fingerprint == said["bfloat16"].fingerprint
        assert same == (kept == "bfloat16")
        assert said["int8"].fingerprint not in (said["auto"].fingerprint, said["bfloat16"].fingerprint)


def test_torch_keeps_what_the_kernels_keep() -> None:
    """The same codes and scales: zeros, infinities and NaN included."""
    layers = simulated_architecture().layers
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((2, 16, 1, 8)) * 10.0 ** rng.integers(-9, 9, (2, 16, 1, 1))).astype(
        np.float32
    )
    k[3], v[4], k[5, 0, 2], v[6, 0, 7] = 0, 0, np.inf, np.nan
    slots = rng.permutation(32)[:16]
    pool = POOLS["int8"](2, 1, 8)
    expected = pool.write(slots, k, v)
    kept = TorchKV(layers, 2, kv_cache_dtype="int8")
    where = torch.from_numpy(slots)
    kept.write(0, where, torch.from_numpy(k), torch.from_numpy(v))
    for got, want in zip(kept.read(0, where), expected, strict=True):
        largest = np.maximum(np.abs(want).max(-1, keepdims=True), 1e-30)
        np.testing.assert_allclose(got.numpy() / largest, want / largest, rtol=0, atol=1e-6)
