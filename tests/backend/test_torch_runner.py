"""The torch runner as a citizen: settings, errors, capabilities, life and death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import open_torch_runner, reference_logits
from headrace.errors import ConfigError, EngineDeadError, InvalidRequestError, OutOfMemoryError
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import single_batch
from tests.model.tiny import CASES

PROMPT = [5, 17, 250, 3, 99, 42, 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    CASES["qwen3"](folder)
    return SafetensorsCheckpoint(folder)


def settings(**changes: Any) -> RunnerSettings:
    sizes = {"num_blocks": 4, "max_batch_tokens": 64, "max_sequences": 4, "max_model_len": 64}
    return RunnerSettings(**{**sizes, **changes})


def test_importing_the_backend_does_not_import_torch() -> None:
    code = "import sys, headrace.backend.torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_the_way_to_get_it(
    checkpoint: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[gpu\]'"):
        open_torch_runner(checkpoint, settings())
    with pytest.raises(ConfigError, match=r"headrace\[gpu\]"):
        reference_logits(checkpoint, PROMPT)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:99", "cpu:x", "meta"])
def test_devices_that_cannot_be_used(checkpoint: SafetensorsCheckpoint, device: str) -> None:
    with pytest.raises(ConfigError, match=f"Device '{device}' cannot be used"):
        open_torch_runner(checkpoint, settings(device=device))


@pytest.mark.parametrize("dtype", ["int8", 16, "float64"])
def test_dtypes_that_cannot_be_used(checkpoint: SafetensorsCheckpoint, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        open_torch_runner(checkpoint, settings(extra={"dtype": dtype}))


def test_what_does_not_fit_is_refused_before_loading(checkpoint: SafetensorsCheckpoint) -> None:
    slot_bytes = 3 * 2 * 2 * 32 * 4  # layers, K and V, kv heads, head_dim, float32
    blocks = 2 * psutil.virtual_memory().total // (slot_bytes * 16)
    with pytest.raises(OutOfMemoryError, match=r"MiB for its weights and .* MiB free"):
        open_torch_runner(checkpoint, settings(num_blocks=blocks))


def test_capabilities(checkpoint: SafetensorsCheckpoint) -> None:
    first = open_torch_runner(checkpoint, settings()).capabilities
    assert (first.backend, first.isa, first.kv_dtype) == ("torch", "cpu", "float32")
    assert not first.batch_invariant
    assert first.threads == torch.get_num_threads()
    assert open_torch_runner(checkpoint, settings()).capabilities == first
    narrow = SafetensorsCheckpoint(checkpoint.path, quantization="int8")
    other = [
        open_torch_runner(narrow, settings()).capabilities.fingerprint,
        open_torch_runner(checkpoint, settings(extra={"dtype": "bfloat16"})).capabilities.fingerprint,
    ]
    assert len({first.fingerprint, *other}) == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.12), ("float16", 0.015)])
def test_half_precision_is_near_the_oracle(
    checkpoint: SafetensorsCheckpoint, dtype: str, tolerance: float
) -> None:
    """The path of other devices, in their dtype, on the CPU."""
    exact = reference_logits(checkpoint, PROMPT)
    runner = open_torch_runner(checkpoint, settings(extra={"dtype": dtype}))
    got = runner.logits(single_batch(PROMPT, 0, [2], "all"))
    assert got.dtype == np.float32
    error = np.abs(got - exact).max()
    assert 0 < error < tolerance * np.abs(exact).max()


@pytest.mark.parametrize(("quantization", "low", "high"), [("int8", 0.001, 0.05), ("int4", 0.05, 0.5)])
def test_quantised_weights_are_dequantised(
    checkpoint: SafetensorsCheckpoint, quantization: Any, low: float, high: float
) -> None:
    exact = reference_logits(checkpoint, PROMPT)
    got = reference_logits(SafetensorsCheckpoint(checkpoint.path, quantization=quantization), PROMPT)
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert low < error < high


def test_sequence_logits_leave_the_kv_cache_alone(checkpoint: SafetensorsCheckpoint) -> None:
    runner = open_torch_runner(checkpoint, settings())
    whole = runner.logits(single_batch([*PROMPT, 7], 0, [0], "all"))
    runner.logits(single_batch(PROMPT, 0, [1]))
    long = runner.sequence_logits(list(range(200)))  # longer than the runner's own cache
    assert long.shape == (200, 300)
    last = runner.logits(single_batch([7], len(PROMPT), [1]))
    np.testing.assert_allclose(last[0], whole[-1], atol=1e-5)


@pytest.mark.parametrize("token_ids", [[], [300], [-1], [0, 5, 10**12]])
def test_sequences_outside_the_vocabulary(checkpoint: SafetensorsCheckpoint, token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 299"):
        reference_logits(checkpoint, token_ids)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "int8"])
def test_blocks_can_be_taken_out_and_put_elsewhere(
    checkpoint: SafetensorsCheckpoint, kv_cache_dtype: Any
) -> None:
    """What a second tier does with them: another runner reads the same keys and values in another block."""
    one, other = (open_torch_runner(checkpoint, settings(kv_cache_dtype=kv_cache_dtype)) for _ in range(2))
    one.logits(single_batch(PROMPT, 0, [2]))
    [size] = one.block_bytes
    taken = one.read_blocks(0, [2, 0])
    assert (taken.shape, taken.dtype) == ((2, size), np.uint8)
    assert taken[0].any() and not taken[1].any()
    other.write_blocks(0, [3, 1], taken)
    np.testing.assert_array_equal(other.read_blocks(0, [1, 3]), taken[::-1])
    np.testing.assert_array_equal(
        other.logits(single_batch([7], len(PROMPT), [3])), one.logits(single_batch([7], len(PROMPT), [2]))
    )


def test_a_closed_runner_says_so(checkpoint: SafetensorsCheckpoint) -> None:
    runner = open_torch_runner(checkpoint, settings())
    runner.close()
    runner.close()
    with pytest.raises(EngineDeadError, match="closed"):
        runner.run(single_batch(PROMPT, 0, [0]))
    with pytest.raises(EngineDeadError, match="closed"):
        runner.sequence_logits(PROMPT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), (None, 0.12)])
def test_cuda(checkpoint: SafetensorsCheckpoint, dtype: str | None, tolerance: float) -> None:
    exact = reference_logits(checkpoint, PROMPT)
    runner = open_torch_runner(checkpoint, settings(device="cuda", extra={"dtype": dtype}))
    assert runner.capabilities.isa.endswith("(experimental)")
    got = runner.logits(single_batch(PROMPT, 0, [3], "all"))
    assert np.abs(got - exact).max() < tolerance * np.abs(exact).max()
