"""SmolLM2 as shipped: what 4-bit weights, int8 activations and KV in bf16 or int8 cost against float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.backend.batch import Batch, Float32
from headrace.backend.cpu import _native
from headrace.backend.cpu.runner import chosen_isa, open_cpu_runner
from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import RunnerSettings
from headrace.backend.torch import open_torch_runner
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model.weights import open_checkpoint
from tests.backend.batches import Piece, batch_of
from tests.data.prompts import PROMPTS

pytestmark = pytest.mark.native

LONGEST = 24  # tokens of a prompt that are compared: the oracle is slow
PROMPTS_PER_STEP = 20
ROWS = PROMPTS_PER_STEP * LONGEST
SETTINGS = RunnerSettings(
    num_blocks=2 * PROMPTS_PER_STEP,
    max_batch_tokens=ROWS,
    max_sequences=ROWS,
    max_model_len=64,
    threads=2,
)


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Iterator[Callable[[Batch], Float32]]:
    """Logits in float32, on two threads; those of the last batch are kept."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    runner = open_torch_runner(open_checkpoint(smollm2_path), SETTINGS)
    last: list[tuple[bytes, Float32]] = []

    def logits(batch: Batch) -> Float32:
        asked = batch.token_ids.tobytes()
        if not last or last[0][0] != asked:
            last[:] = [(asked, runner.logits(batch))]
        return last[0][1]

    yield logits
    runner.close()
    torch.set_num_threads(before)


def compare(got: Float32, reference: Float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: whether the most likely token is the same, and the KL divergence of reference to got."""
    a, b = torch.from_numpy(reference).log_softmax(-1), torch.from_numpy(got).log_softmax(-1)
    same = a.argmax(-1) == b.argmax(-1)
    return same, torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_smollm2_against_float32(
    smollm2_path: Path, oracle: Callable[[Batch], Float32], kv: KVCacheDtype
) -> None:
    """Same top-1 at 97 % of positions or more, mean KL at most 0.01, over 200 prompts; over 20 in int8."""
    checkpoint = open_checkpoint(smollm2_path)
    tokenizer = load_tokenizer(smollm2_path)
    # The best path answers for all prompts; the others differ from it by float32 rounding only.
    step = 1 if chosen_isa() == _native.supported_isas()[0] and kv == "auto" else 10
    prompts = [tokenizer.encode(prompt)[:LONGEST] for prompt in PROMPTS[::step]]
    assert len(prompts) == 200 // step
    native = open_cpu_runner(checkpoint, dataclasses.replace(SETTINGS, kv_cache_dtype=kv))
    same, divergence = [], []
    for start in range(0, len(prompts), PROMPTS_PER_STEP):
        pieces = [
            Piece(tokens, 0, [2 * i, 2 * i + 1])
            for i, tokens in enumerate(prompts[start : start + PROMPTS_PER_STEP])
        ]
        batch = batch_of(pieces, "all")
        agrees, kl = compare(native.logits(batch), oracle(batch))
        same.append(agrees)
        divergence.append(kl)
    native.close()
    agreement = torch.cat(same).double().numpy()
    kl = torch.cat(divergence).double().numpy()
    print(
        f"\n{agreement.size} positions of {len(prompts)} prompts: same top-1 {agreement.mean():.2%}, "
        f"KL mean {kl.mean():.5f}, median {np.median(kl):.5f}, p99 {np.quantile(kl, 0.99):.4f}, "
        f"max {kl.max():.3f}"
    )
    assert agreement.mean() >= 0.97
    assert kl.mean() <= 0.01
