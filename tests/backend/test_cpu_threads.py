"""Threads of a program: same bits, no race, nobody left asleep. Without torch, for ThreadSanitizer."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.backend.batch import Float32
from headrace.backend.cpu.runner import CpuRunner, open_cpu_runner
from headrace.backend.runner import RunnerSettings
from headrace.model.architecture import (
    Architecture,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from headrace.model.checkpoint import Tensor
from headrace.model.weights.load_quantization import quantize
from headrace.model.weights.tensor_shapes import expected_shapes
from tests.backend.batches import Piece, batch_of

pytestmark = pytest.mark.native


class RandomCheckpoint:
    """Two layers of seeded noise at int8: implements headrace.model.checkpoint.Checkpoint without a file.

    ``window``: of the second layer.
    """

    def __init__(self, window: int | None = None) -> None:
        attention = AttentionSpec(
            heads=4, kv_heads=2, head_dim=32, rope=RopeSpec(10_000.0, 32), scale=32**-0.5, qk_norm=NormSpec()
        )
        layer = LayerSpec(attention, FeedForwardSpec(width=160), NormSpec())
        other = layer
        if window is not None:
            other = dataclasses.replace(
                layer, attention=dataclasses.replace(attention, window=window), kv_group=1
            )
        self.architecture = Architecture("random", 200, 96, 2048, (layer, other), NormSpec(), tied_head=False)
        self.path = Path("random")

    def names(self) -> tuple[str, ...]:
        return tuple(expected_shapes(self.architecture))

    def tensor(self, name: str) -> Tensor:
        shape = expected_shapes(self.architecture)[name]
        values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        return values if len(shape) == 1 else quantize(values / np.float32(shape[1] ** 0.5), "int8")

    def fingerprint(self) -> str:
        return "random"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))


def open_runner(threads: int) -> CpuRunner:
    settings = RunnerSettings(
        num_blocks=16, max_batch_tokens=80, max_sequences=80, max_model_len=128, threads=threads
    )
    return open_cpu_runner(RandomCheckpoint(), settings)


def steps(runner: CpuRunner, pause_s: float = 0.0) -> Float32:
    """A prefill of two sequences, then decodes of both, all their logits."""
    tokens = np.random.default_rng(1).integers(0, 200, 80).tolist()
    blocks = [[9, 3, 7], [1, 0, 2]]
    rows = [
        runner.logits(batch_of([Piece(tokens[:41], 0, blocks[0]), Piece(tokens[41:70], 0, blocks[1])], "all"))
    ]
    for i in range(5):
        time.sleep(pause_s)
        decode = [Piece([tokens[70 + i]], 41 + i, blocks[0]), Piece([tokens[75 + i]], 29 + i, blocks[1])]
        rows.append(runner.logits(batch_of(decode, "last")))
    return np.concatenate(rows)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_same_bits(threads: int) -> None:
    expected = steps(open_runner(1))
    runner = open_runner(threads)
    for _ in range(3):
        np.testing.assert_array_equal(steps(runner), expected)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("window", [None, 700])
def test_contexts_that_threads_share_have_the_same_bits(window: int | None) -> None:
    """Alone a long sequence's context is split between threads; beside enough others it is not."""
    rng = np.random.default_rng(2)
    tokens, blocks = rng.integers(0, 200, 1700).tolist(), rng.permutation(110).tolist()
    others = [Piece([number], 0, [110 + number]) for number in range(50)]
    settings = RunnerSettings(
        num_blocks=160, max_batch_tokens=80, max_sequences=80, max_model_len=1760, threads=1
    )
    groups = 1 if window is None else 2
    rows = []
    for threads in (1, 2, 3, 5):
        runner = open_cpu_runner(RandomCheckpoint(window), dataclasses.replace(settings, threads=threads))
        for start in range(0, 1690, 65):
            runner.run(batch_of([Piece(tokens[start : start + 65], start, blocks)], num_groups=groups))
        for _ in range(3):
            rows.append(runner.logits(batch_of([Piece(tokens[1690:1691], 1690, blocks)], num_groups=groups)))
            several = batch_of([Piece(tokens[1688:1691], 1688, blocks)], num_groups=groups)
            rows.append(runner.logits(several))
        crowd = batch_of([Piece(tokens[1690:1691], 1690, blocks), *others], num_groups=groups)
        rows.append(runner.logits(crowd)[:1])
        runner.close()
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


@pytest.mark.usefixtures("cache")
def test_threads_that_went_to_sleep_wake_up() -> None:
    """They stop spinning after about a hundred microseconds: a lost wake-up would hang the next step."""
    runner = open_runner(3)
    expected = steps(runner)
    np.testing.assert_array_equal(steps(runner, pause_s=0.01), expected)


@pytest.mark.usefixtures("cache")
def test_runners_come_and_go() -> None:
    """Closed right after a step, while asleep, or without ever having run."""
    expected = steps(open_runner(1))
    for pause_s in (0.0, 0.0, 0.005):
        runner, unused = open_runner(3), open_runner(2)
        np.testing.assert_array_equal(steps(runner), expected)
        time.sleep(pause_s)
        runner.close()
        unused.close()


@pytest.mark.usefixtures("cache")
def test_two_runners_at_once() -> None:
    """Each has its threads and its memory; the interpreter's lock is free during a step."""
    expected = steps(open_runner(1))
    got: list[Float32] = []

    def work() -> None:
        got.append(steps(open_runner(2)))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 2
    for each in got:
        np.testing.assert_array_equal(each, expected)
