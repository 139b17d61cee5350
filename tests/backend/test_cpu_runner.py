"""The cpu runner as a citizen: settings, life and death, and weights that poison one sequence only."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.backend.batch import Batch
from headrace.backend.cpu import _native
from headrace.backend.cpu.cores import usable_cores
from headrace.backend.cpu.runner import CpuRunner, open_cpu_runner
from headrace.backend.kv_format import KVCacheDtype
from headrace.backend.runner import RunnerSettings
from headrace.errors import ConfigError, EngineDeadError, ModelFormatError
from headrace.model.checkpoint import Tensor
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import Piece, batch_of
from tests.model.tiny import CASES

pytestmark = pytest.mark.native

SETTINGS = RunnerSettings(num_blocks=12, max_batch_tokens=64, max_sequences=64, max_model_len=64, threads=1)
POISON = 9  # the token id whose embedding is NaN
CLEAN = [list(range(10, 29)), [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made: Path = tmp_path_factory.mktemp("llama3")
    CASES["llama3"](made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield made


@pytest.fixture(scope="module")
def poisoned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    """The same network, one row of its embedding table NaN."""
    copy: Path = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return SafetensorsCheckpoint(copy)


def open_runner(folder: Path, **changes: int) -> CpuRunner:
    return open_cpu_runner(SafetensorsCheckpoint(folder), dataclasses.replace(SETTINGS, **changes))


def clean_batch(first_block: int = 0) -> Batch:
    pieces = [Piece(CLEAN[0], 0, [first_block, first_block + 1]), Piece(CLEAN[1], 0, [first_block + 2])]
    return batch_of(pieces, "all")


@pytest.mark.parametrize("wrong", ["sse2", "AVX512", " avx2", "portable,avx2"])
def test_a_kernel_path_that_there_is_not(folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ISA", wrong)
    with pytest.raises(ConfigError, match=r"HEADRACE_ISA.*portable"):
        open_runner(folder)


def test_without_a_choice_the_best_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_ISA", raising=False)
    assert open_runner(folder).capabilities.isa == _native.supported_isas()[0]
    monkeypatch.setenv("HEADRACE_ISA", "")
    assert open_runner(folder).capabilities.isa == _native.supported_isas()[0]


def test_what_it_says_of_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal fingerprints promise equal tokens: another path is another fingerprint, other threads are not."""
    prints = set()
    for isa in _native.supported_isas():
        monkeypatch.setenv("HEADRACE_ISA", isa)
        said = open_runner(folder).capabilities
        assert (said.backend, said.isa, said.kv_dtype) == ("cpu", isa, "bfloat16")
        assert open_runner(folder, threads=2).capabilities.fingerprint == said.fingerprint
        prints.add(said.fingerprint)
    assert len(prints) == len(_native.supported_isas())


@pytest.mark.parametrize("threads", [-1, 257, 100_000])
def test_impossible_numbers_of_threads(folder: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        open_runner(folder, threads=threads)


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 5, 16])
def test_any_number_of_threads_gives_the_same_bits(folder: Path, threads: int) -> None:
    """More threads than cores or rows included."""
    one = open_runner(folder)
    many = open_runner(folder, threads=threads)
    assert many.capabilities.threads == (threads or usable_cores())
    for _ in range(3):
        np.testing.assert_array_equal(many.logits(clean_batch()), one.logits(clean_batch()))
    many.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_blocks_can_be_taken_out_and_put_elsewhere(folder: Path, kv_cache_dtype: KVCacheDtype) -> None:
    """What a second tier does with them: another runner reads the same keys and values in other blocks."""
    sizes = dataclasses.replace(SETTINGS, kv_cache_dtype=kv_cache_dtype)
    one, other = (open_cpu_runner(SafetensorsCheckpoint(folder), sizes) for _ in range(2))
    one.run(clean_batch())
    [size] = one.block_bytes
    taken = one.read_blocks(0, [0, 1])
    assert (taken.shape, taken.dtype) == ((2, size), np.uint8)
    other.write_blocks(0, [11, 4], taken)
    np.testing.assert_array_equal(other.read_blocks(0, [4, 11]), taken[::-1])
    following = len(CLEAN[0])
    np.testing.assert_array_equal(
        other.logits(batch_of([Piece([7], following, [11, 4])])),
        one.logits(batch_of([Piece([7], following, [0, 1])])),
    )


def test_closing_twice_is_fine_and_running_after_it_is_not(folder: Path) -> None:
    runner = open_runner(folder)
    runner.run(clean_batch())
    runner.close()
    runner.close()
    for call in (runner.run, runner.logits):
        with pytest.raises(EngineDeadError, match="closed"):
            call(clean_batch())


def test_a_poisoned_sequence_fails_alone(
    folder: Path, poisoned: SafetensorsCheckpoint, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours keep every bit, and so do the poisoned sequence's own tokens before the poison."""
    monkeypatch.setenv("HEADRACE_ISA", isa)
    clean, runner = open_runner(folder), open_cpu_runner(poisoned, SETTINGS)
    expected = clean.logits(clean_batch())
    bad = [*CLEAN[0][:17], POISON, *CLEAN[0][18:]]
    pieces = [Piece(CLEAN[0], 0, [0, 1]), Piece(bad, 0, [4, 5]), Piece(CLEAN[1], 0, [2])]
    batch = batch_of(pieces, "all")
    logits, result = runner.logits(batch), runner.run(batch)
    failed = np.zeros(len(batch.logit_rows), np.bool_)
    failed[19 + 17 : 19 + 19] = True
    np.testing.assert_array_equal(result.failed, failed)
    assert np.isnan(logits[failed]).any(axis=1).all()
    np.testing.assert_array_equal(logits[:19], expected[:19])
    np.testing.assert_array_equal(logits[19 : 19 + 17], expected[:17])
    np.testing.assert_array_equal(logits[38:], expected[19:])


def test_a_result_holds_nothing_of_the_one_before(folder: Path) -> None:
    """Their arrays are the same: a row that asked for fewer top tokens had the last step's behind its own."""
    runner = open_runner(folder)
    for asked in ([3, -1], [-1, 2], [0, 3]):
        batch = clean_batch()
        batch.sampling.num_logprobs[: len(asked)] = asked
        result = runner.run(batch)
        for row, wanted in enumerate(asked):
            told = max(wanted, 0)
            assert (result.top_ids[row, :told] >= 0).all() and (result.top_ids[row, told:] == -1).all()
            assert np.isnan(result.top_logprobs[row, told:]).all()
            assert np.isnan(result.logprobs[row]) == (wanted < 0)


def test_blocks_that_held_poison_can_be_used_again(
    folder: Path, poisoned: SafetensorsCheckpoint, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN left in a freed block is behind every mask: a weight of zero would let it through."""
    monkeypatch.setenv("HEADRACE_ISA", isa)
    runner = open_cpu_runner(poisoned, SETTINGS)
    runner.run(batch_of([Piece([POISON] * 48, 0, [0, 1, 2])], "last"))
    np.testing.assert_array_equal(runner.logits(clean_batch()), open_runner(folder).logits(clean_batch()))


class NanScales:
    """A checkpoint whose embedding has one group scale that is NaN, as a damaged GGUF file may have."""

    def __init__(self, source: SafetensorsCheckpoint) -> None:
        self._source = source
        self.architecture, self.path = source.architecture, source.path

    def names(self) -> tuple[str, ...]:
        return self._source.names()

    def tensor(self, name: str) -> Tensor:
        tensor = self._source.tensor(name)
        if name == "embed.weight":
            assert isinstance(tensor, QuantTensor)
            tensor.scale[POISON, 1] = np.nan
        return tensor

    def fingerprint(self) -> str:
        return self._source.fingerprint() + " damaged"


def test_a_scale_that_is_nan_fails_the_rows_that_meet_it(folder: Path) -> None:
    source = SafetensorsCheckpoint(folder, quantization="int8")
    clean, damaged = open_cpu_runner(source, SETTINGS), open_cpu_runner(NanScales(source), SETTINGS)
    pieces = [Piece(CLEAN[0], 0, [0, 1]), Piece([5, POISON], 0, [4])]
    logits, result = damaged.logits(batch_of(pieces, "last")), damaged.run(batch_of(pieces, "last"))
    assert result.failed.tolist() == [False, True]
    np.testing.assert_array_equal(logits[0], clean.logits(batch_of(pieces, "last"))[0])


def test_a_tensor_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match="up"):
        open_runner(copy)
