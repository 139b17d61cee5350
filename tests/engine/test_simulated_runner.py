"""The simulated runner must notice what real kernels would silently get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
from small_engines import request, run, small_engine, tokens

from headrace.backend.batch import Batch
from headrace.backend.runner import RunnerSettings
from headrace.backend.simulated import Latency, SimulatedRunner, simulated_architecture
from headrace.backend.simulated.runner import BatchContractError
from headrace.engine.engine import Engine


def engine_with_batch() -> tuple[Engine, Batch]:
    """An engine with three sequences in decode, and their next batch."""
    engine = small_engine(windows=(None, 20))
    for i in range(3):
        engine.add(request(f"r{i}", tokens(30 + i, i), max_tokens=50, ignore_eos=True))
    engine.step()
    batch = engine.scheduler.schedule(0.0)
    assert batch is not None
    return engine, batch


def _swap_blocks(batch: Batch) -> None:
    batch.block_tables[1][0, 0], batch.block_tables[1][0, 1] = 90, 91  # a window of 20 sees both


def _swap_sequences(batch: Batch) -> None:
    batch.block_tables[0][[0, 1]] = batch.block_tables[0][[1, 0]]


def _write_elsewhere(batch: Batch) -> None:
    batch.slot_mapping[0][0] += 1


def _write_into_a_shared_block(batch: Batch) -> None:
    batch.block_tables[0][1, 0] = batch.block_tables[0][0, 1]


def _skip_a_position(batch: Batch) -> None:
    batch.positions[0] += 1


def _longer_context(batch: Batch) -> None:
    batch.context_len[2] += 1


def _unknown_token(batch: Batch) -> None:
    batch.token_ids[0] = 64


@pytest.mark.parametrize(
    "damage",
    [
        _swap_blocks,
        _swap_sequences,
        _write_elsewhere,
        _write_into_a_shared_block,
        _skip_a_position,
        _longer_context,
        _unknown_token,
    ],
)
def test_a_broken_batch_is_refused(damage: Callable[[Batch], None]) -> None:
    """Each of these is an engine bug that would have shown as somebody else's text."""
    engine, batch = engine_with_batch()
    engine.runner.run(copy.deepcopy(batch))
    broken = copy.deepcopy(batch)
    damage(broken)
    with pytest.raises(BatchContractError):
        engine.runner.run(broken)


def test_a_block_of_another_text_changes_the_output() -> None:
    """Positions alone cannot tell two sequences' blocks apart: the tokens read decide the next one."""
    engine, batch = engine_with_batch()
    right = engine.runner.logits(batch)[0]  # type: ignore[attr-defined]
    mixed = copy.deepcopy(batch)
    mixed.block_tables[0][0, 0] = mixed.block_tables[0][1, 0]
    wrong = engine.runner.logits(mixed)[0]  # type: ignore[attr-defined]
    assert not np.array_equal(right, wrong)


def test_latency_passes_on_the_clock_that_is_given() -> None:
    """A simulated hour must not take an hour."""
    slept: list[float] = []
    settings = RunnerSettings(num_blocks=8, max_batch_tokens=64, max_sequences=4, max_model_len=64)
    runner = SimulatedRunner(
        simulated_architecture(), settings, latency=Latency(step_s=2.0, token_s=0.5), sleep=slept.append
    )
    engine = small_engine(num_blocks=8, max_model_len=64)
    engine.runner = runner
    run(engine, [request("r", tokens(10, 1), max_tokens=3, ignore_eos=True)])
    assert slept == [7.0, 2.5, 2.5]
