"""Programs and batches that are wrong: refused as a whole, whatever is wrong, and nothing breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backend.batch import Batch, Float32
from headrace.backend.cpu import _native
from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.instruction import INSTRUCTION, Base, Op
from headrace.backend.cpu.recorder import Recording, record
from headrace.backend.cpu.runner import CpuRunner, chosen_isa, open_cpu_runner
from headrace.backend.cpu.weights_file import PackedWeights, packed_weights
from headrace.backend.kv_format import kv_block_bytes
from headrace.backend.runner import RunnerSettings
from headrace.model.architecture import Architecture
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.backend.batches import Piece, batch_of
from tests.model.tiny import CASES

pytestmark = pytest.mark.native

BLOCKS, VOCAB = 12, 300
SETTINGS = RunnerSettings(
    num_blocks=BLOCKS, max_batch_tokens=40, max_sequences=8, max_model_len=64, threads=1
)
PROMPTS = [list(range(10, 29)), [3, 1, 4, 1, 5], list(range(200, 216))]

fuzz = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafetensorsCheckpoint]:
    """Gemma 3 at int4: every instruction there is, two KV windows, three weight formats."""
    folder: Path = tmp_path_factory.mktemp("gemma3")
    CASES["gemma3-softcap"](folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield SafetensorsCheckpoint(folder, quantization="int4")


@pytest.fixture(scope="module")
def runner(checkpoint: SafetensorsCheckpoint) -> CpuRunner:
    return open_cpu_runner(checkpoint, SETTINGS)


def good_batch(runner: CpuRunner) -> Batch:
    """Three whole prompts: whatever an earlier batch left in the KV cache, it is written anew."""
    blocks = [[7, 2], [0], [11]]
    pieces = [Piece(tokens, 0, mine) for tokens, mine in zip(PROMPTS, blocks, strict=True)]
    return batch_of(pieces, "last", len(runner.architecture.kv_groups))


@pytest.fixture(scope="module")
def expected(runner: CpuRunner) -> Float32:
    return runner.logits(good_batch(runner))


def assert_usable(runner: CpuRunner, expected: Float32) -> None:
    np.testing.assert_array_equal(runner.logits(good_batch(runner)), expected)


# -- batches ------------------------------------------------------------------------------------------


def edited(array: NDArray[Any], index: int, value: int) -> NDArray[Any]:
    copy = array.copy()
    copy.flat[index] = value
    return copy


def first(arrays: Sequence[NDArray[Any]], change: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    return (change, *arrays[1:])


BIG, SMALL = 2**31 - 1, -(2**31)
BAD_BATCHES: dict[str, Any] = {
    "token id beyond": lambda b: {"token_ids": edited(b.token_ids, 3, VOCAB)},
    "token id negative": lambda b: {"token_ids": edited(b.token_ids, 0, -1)},
    "token id enormous": lambda b: {"token_ids": edited(b.token_ids, 39, BIG)},
    "position beyond": lambda b: {"positions": edited(b.positions, 39, 64)},
    "position negative": lambda b: {"positions": edited(b.positions, 0, -1)},
    "position skipped": lambda b: {"positions": edited(b.positions, 5, 6)},
    "slot beyond": lambda b: {
        "slot_mapping": first(b.slot_mapping, edited(b.slot_mapping[0], 2, BLOCKS * 16))
    },
    "slot negative": lambda b: {"slot_mapping": first(b.slot_mapping, edited(b.slot_mapping[0], 2, -1))},
    "block beyond": lambda b: {"block_tables": first(b.block_tables, edited(b.block_tables[0], 0, BLOCKS))},
    "block negative": lambda b: {"block_tables": first(b.block_tables, edited(b.block_tables[0], 1, -1))},
    "block enormous": lambda b: {"block_tables": first(b.block_tables, edited(b.block_tables[0], 2, SMALL))},
    "table too narrow": lambda b: {
        "block_tables": tuple(np.ascontiguousarray(t[:, :1]) for t in b.block_tables)
    },
    "table without columns": lambda b: {"block_tables": tuple(t[:, :0].copy() for t in b.block_tables)},
    "table with a row too few": lambda b: {"block_tables": tuple(t[:2] for t in b.block_tables)},
    "tables of one group too few": lambda b: {"block_tables": b.block_tables[1:]},
    "slots of one group too few": lambda b: {"slot_mapping": b.slot_mapping[1:]},
    "slots too few": lambda b: {"slot_mapping": first(b.slot_mapping, b.slot_mapping[0][:-1])},
    "query_start late": lambda b: {"query_start": edited(b.query_start, 0, 1)},
    "query_start short": lambda b: {"query_start": edited(b.query_start, 3, 39)},
    "query_start long": lambda b: {"query_start": edited(b.query_start, 3, 41)},
    "query_start descends": lambda b: {"query_start": edited(b.query_start, 1, 30)},
    "query_start negative": lambda b: {"query_start": edited(b.query_start, 1, -5)},
    "query_start enormous": lambda b: {"query_start": edited(b.query_start, 1, BIG)},
    "query_start alone": lambda b: {"query_start": b.query_start[:1]},
    "query_start empty": lambda b: {"query_start": b.query_start[:0]},
    "a sequence without tokens": lambda b: {"query_start": edited(b.query_start, 1, 24)},
    "context_len off by one": lambda b: {"context_len": edited(b.context_len, 1, 6)},
    "context_len short": lambda b: {"context_len": b.context_len[:2]},
    "logit row beyond": lambda b: {"logit_rows": edited(b.logit_rows, 0, 40)},
    "logit row negative": lambda b: {"logit_rows": edited(b.logit_rows, 2, -1)},
    "logit rows without a table": lambda b: {"logit_rows": b.logit_rows[:2]},
    "token ids too few": lambda b: {"token_ids": b.token_ids[:-1]},
    "token ids too many": lambda b: {"token_ids": np.append(b.token_ids, np.int32(1))},
    "no tokens": lambda b: {"token_ids": b.token_ids[:0], "positions": b.positions[:0]},
    "64-bit token ids": lambda b: {"token_ids": b.token_ids.astype(np.int64) + 2**33},
    "64-bit positions": lambda b: {"positions": b.positions.astype(np.int64)},
    "64-bit tables": lambda b: {"block_tables": tuple(t.astype(np.int64) for t in b.block_tables)},
    "float token ids": lambda b: {"token_ids": b.token_ids.astype(np.float32)},
    "every other position": lambda b: {"positions": np.repeat(b.positions, 2)[::2]},
    "a matrix of positions": lambda b: {"positions": b.positions[None]},
    "a list of token ids": lambda b: {"token_ids": b.token_ids.tolist()},
    "nothing": lambda b: {"query_start": None},
}
BAD_TABLES: dict[str, Any] = {
    "temperatures too few": lambda t: {"temperature": t.temperature[:2]},
    "64-bit temperatures": lambda t: {"temperature": t.temperature.astype(np.float64)},
    "seen_start late": lambda t: {"seen_start": edited(t.seen_start, 0, 1)},
    "seen_start beyond": lambda t: {"seen_start": edited(t.seen_start, 3, 5)},
    "seen_start descends": lambda t: {"seen_start": edited(t.seen_start, 1, 5)},
    "seen_start negative": lambda t: {"seen_start": edited(t.seen_start, 2, -5)},
    "seen_start short": lambda t: {"seen_start": t.seen_start[:3]},
    "bias_start beyond": lambda t: {"bias_start": edited(t.bias_start, 3, BIG)},
    "bias_start descends": lambda t: {"bias_start": edited(t.bias_start, 1, SMALL)},
    "bias values too many": lambda t: {"bias_values": np.zeros(1, np.float32)},
    "mask beyond": lambda t: {"mask_row": edited(t.mask_row, 1, 0)},
    "mask too narrow": lambda t: {"mask_row": edited(t.mask_row, 1, 0), "masks": np.zeros((1, 9), np.uint32)},
    "masks of one dimension": lambda t: {"masks": np.zeros(10, np.uint32)},
}


@pytest.mark.parametrize("wrong", BAD_BATCHES)
def test_a_wrong_batch_is_refused(runner: CpuRunner, expected: Float32, wrong: str) -> None:
    """An index outside reads or writes someone else's memory; a 64-bit id used to be cut to 32 in silence."""
    batch = good_batch(runner)
    with pytest.raises((ValueError, TypeError)):
        runner.run(dataclasses.replace(batch, **BAD_BATCHES[wrong](batch)))
    assert_usable(runner, expected)


@pytest.mark.parametrize("wrong", BAD_TABLES)
def test_a_wrong_sampling_table_is_refused(runner: CpuRunner, expected: Float32, wrong: str) -> None:
    batch = good_batch(runner)
    table = dataclasses.replace(batch.sampling, **BAD_TABLES[wrong](batch.sampling))
    with pytest.raises((ValueError, TypeError)):
        runner.run(dataclasses.replace(batch, sampling=table))
    assert_usable(runner, expected)


def test_ids_outside_of_the_vocabulary_fail_their_row_alone(runner: CpuRunner) -> None:
    """As with the numpy sampler; the whole batch used to be refused, neighbours and all."""
    batch = good_batch(runner)
    clean = runner.run(batch).token_ids.copy()
    table = dataclasses.replace(
        batch.sampling,
        bias_start=np.array([0, 0, 1, 1], np.int32),
        bias_ids=np.array([VOCAB + 7], np.int32),
        bias_values=np.ones(1, np.float32),
    )
    got = runner.run(dataclasses.replace(batch, sampling=table))
    assert got.failed.tolist() == [False, True, False]
    assert got.token_ids[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_too_much_at_once_is_refused(runner: CpuRunner, expected: Float32) -> None:
    groups = len(runner.architecture.kv_groups)
    with pytest.raises(ValueError, match="tokens"):
        runner.run(batch_of([Piece(list(range(41)), 0, [0, 1, 2])], "last", groups))
    with pytest.raises(ValueError, match="sequences"):
        runner.run(batch_of([Piece([i], 0, [i]) for i in range(9)], "last", groups))
    with pytest.raises(ValueError, match="logit rows"):
        runner.run(batch_of([Piece(list(range(9)), 0, [0])], "all", groups))
    assert_usable(runner, expected)


def test_no_logit_rows_at_all(runner: CpuRunner, expected: Float32) -> None:
    """A chunk in the middle of a prompt samples nothing."""
    batch = good_batch(runner)
    empty = batch_of([Piece(PROMPTS[0][:5], 0, [3])], "all", len(runner.architecture.kv_groups))
    cut = {
        field.name: getattr(empty.sampling, field.name)[: 1 if field.name.endswith("start") else 0]
        for field in dataclasses.fields(empty.sampling)
    }
    table = dataclasses.replace(empty.sampling, **cut)
    result = runner.run(dataclasses.replace(empty, logit_rows=empty.logit_rows[:0], sampling=table))
    assert result.token_ids.size == 0
    assert len(batch.logit_rows) == 3
    assert_usable(runner, expected)


INDEX_FIELDS = ("token_ids", "positions", "query_start", "context_len", "logit_rows")
numbers = st.one_of(
    st.integers(-2, 70),
    st.sampled_from(
        [BIG, SMALL, BIG - 15, VOCAB - 1, VOCAB, BLOCKS * 16 - 1, BLOCKS * 16, BLOCKS - 1, BLOCKS]
    ),
)


@fuzz
@given(data=st.data())
def test_random_batches_never_crash(runner: CpuRunner, expected: Float32, data: st.DataObject) -> None:
    batch = good_batch(runner)
    for _ in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from([*INDEX_FIELDS, "slot_mapping", "block_tables"]))
        value = getattr(batch, name)
        group = data.draw(st.integers(0, len(value) - 1)) if isinstance(value, tuple) else None
        array = value if group is None else value[group]
        match data.draw(st.sampled_from(["edit", "edit", "edit", "cut", "grow"])):
            case "edit" if array.size:
                array = edited(array, data.draw(st.integers(0, array.size - 1)), data.draw(numbers))
            case "cut":
                array = np.ascontiguousarray(array[..., : data.draw(st.integers(0, array.shape[-1]))])
            case "grow":
                array = np.concatenate([array, array[-1:]])
        if group is not None:
            array = (*value[:group], array, *value[group + 1 :])
        batch = dataclasses.replace(batch, **{name: array})
    try:
        runner.run(batch)
    except ValueError:
        assert_usable(runner, expected)


# -- programs -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parts:
    """All that a program is made of."""

    arch: Architecture
    weights: PackedWeights
    recording: Recording

    def build(self, instructions: NDArray[np.void] | None = None, **changes: Any) -> Any:
        """A bound program, as CpuRunner makes it."""
        limits: dict[str, Any] = {
            "max_tokens": SETTINGS.max_batch_tokens,
            "max_sequences": SETTINGS.max_sequences,
            "max_logit_rows": SETTINGS.max_sequences,
            "max_positions": SETTINGS.max_model_len,
            "vocab": self.arch.vocab_size,
            "block_bytes": self.block_bytes,
            "threads": 1,
            "isa": chosen_isa(),
        }
        recorded = self.recording.instructions if instructions is None else instructions
        program = _native.Program(recorded.tobytes(), **(limits | changes))
        program.bind(self.bases())
        return program

    @property
    def block_bytes(self) -> list[int]:
        return [kv_block_bytes(group, "auto") for group in self.arch.kv_groups]

    def bases(self) -> list[NDArray[np.uint8]]:
        scratch = np.zeros(self.recording.scratch_bytes, np.uint8)
        for offset, values in self.recording.constants:
            scratch[offset : offset + values.nbytes] = values.view(np.uint8)
        return [
            self.weights.data,
            scratch,
            *(np.zeros(BLOCKS * size + 64, np.uint8) for size in self.block_bytes),
        ]


@pytest.fixture(scope="module")
def parts(checkpoint: SafetensorsCheckpoint) -> Parts:
    nodes = network_graph(checkpoint.architecture)
    weights = packed_weights(checkpoint, nodes)
    recording = record(nodes, checkpoint.architecture, weights.tensors, SETTINGS, _native.quant_row_bytes)
    return Parts(checkpoint.architecture, weights, recording)


def run(program: Any, batch: Batch) -> NDArray[np.int32]:
    rows = len(batch.logit_rows)
    ids = np.zeros(rows, np.int32)
    program.run(
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.context_len,
        batch.slot_mapping,
        batch.block_tables,
        batch.logit_rows,
        batch.sampling,
        ids,
        np.zeros(rows, np.float32),
        np.zeros((rows, 0), np.int32),
        np.zeros((rows, 0), np.float32),
        np.zeros(rows, np.uint8),
    )
    return ids


def set_field(row: NDArray[np.void], path: str, value: int) -> None:
    """``path`` names a field of an instruction, or one of an operand or format: ``input.offset``."""
    name, _, part = path.partition(".")
    if part:
        row[name][part] = value
    else:
        row[name] = value


HUGE = 2**62
EVERY_OP = [
    ("op", -1),
    ("op", len(Op)),
    ("kv_group", -1),
    ("kv_group", 2),
    ("output.offset", HUGE),
    ("output.offset", -64),
    ("output.offset", 2),
    ("output.base", Base.KV),
    ("output.base", 99),
    ("output.base", Base.WEIGHTS),
]
BAD_FIELDS: dict[Op, list[tuple[str, int]]] = {
    Op.EMBED: [
        *[("i0", 0), ("i0", -64), ("i0", BIG), ("i1", 32), ("i1", BIG), ("logit_rows", 1)],
        *[("format.kind", 5), ("format.kind", -1), ("format.group", 8), ("format.scale_bytes", 3)],
        *[
            ("format.zero_point", -1),
            ("format.zero_point", 256),
            ("weight.base", -1),
            ("weight.offset", HUGE),
        ],
        *[("output.base", -1), ("output_stride", 4), ("output_stride", -256), ("output_stride", HUGE)],
    ],
    Op.ANGLES: [
        ("i0", 0),
        ("i0", 33),
        ("i0", BIG - 1),
        ("weight.offset", 4),
        ("weight.base", -1),
        ("logit_rows", 1),
    ],
    Op.NORM: [
        *[("i0", 0), ("i0", BIG), ("i0", 1 << 20), ("i2", 1), ("input.base", -1), ("weight.base", -1)],
        *[("input_stride", HUGE), ("input_stride", -4), ("output_stride", 0), ("output2.offset", HUGE)],
        *[("output2.base", Base.WEIGHTS), ("input.offset", HUGE), ("weight.offset", HUGE)],
    ],
    Op.QUANTISE: [("i0", 0), ("i0", 1 << 20), ("input.base", -1), ("input_stride", HUGE)],
    Op.MATMUL: [
        *[("i0", 0), ("i0", BIG), ("i0", 1 << 26), ("i1", 0), ("i1", 33), ("i1", BIG - 31), ("i1", 1 << 20)],
        *[("format.group", 8), ("format.group", 64), ("format.scale_bytes", 0), ("weight.base", -1)],
        *[("format.offsets", 3), ("format.offsets", -1), ("format.group", 0), ("format.kind", 4)],
        *[("weight2.base", Base.KV), ("input.base", -1), ("output_stride", 8), ("input_stride", HUGE)],
    ],
    Op.ROPE: [
        *[("heads", 0), ("heads", 3), ("heads", BIG), ("kv_heads", 0), ("kv_heads", -1), ("head_dim", 0)],
        *[("head_dim", 1 << 25), ("kv_offset", -4), ("kv_offset", HUGE), ("kv_offset", 1 << 20), ("i0", 34)],
        *[
            ("i0", -2),
            ("i0", 31),
            ("q_offset", -1),
            ("k_offset", BIG),
            ("v_offset", 1 << 20),
            ("logit_rows", 1),
        ],
        *[("i1", -1), ("i1", 2), ("i1", BIG)],
        *[("weight.offset", HUGE), ("weight2.offset", HUGE), ("input.offset", HUGE)],
    ],
    Op.ATTENTION: [
        *[("heads", 6), ("heads", 1 << 20), ("kv_heads", 3), ("head_dim", -1), ("kv_offset", 1 << 20)],
        *[
            ("q_offset", -1),
            ("q_offset", 1 << 20),
            ("input.base", -1),
            ("input_stride", HUGE),
            ("logit_rows", 1),
            ("i1", -1),
            ("i1", 2),
        ],
    ],
    Op.GLU: [
        *[("i0", 0), ("i0", 1 << 20), ("i1", -1), ("i1", BIG), ("i1", 1 << 24), ("i2", 3), ("i2", -1)],
        *[("input.base", -1), ("output2.offset", HUGE), ("output2.offset", 2)],
    ],
    Op.SOFTCAP: [("i0", 0), ("i0", 1 << 20), ("output_stride", 8)],
    Op.SAMPLE: [
        ("input.base", -1),
        ("input.offset", HUGE),
        ("input_stride", 16),
        ("logit_rows", 0),
        ("input.base", 0),
    ],
}


@pytest.mark.parametrize("op", BAD_FIELDS)
def test_a_malformed_instruction_is_refused(parts: Parts, op: Op) -> None:
    """Row widths count, not only strides: rows wider than their stride ran into what lies behind."""
    recorded = parts.recording.instructions
    (at, *_) = np.flatnonzero(recorded["op"] == op) if op in recorded["op"] else [-1]
    if at < 0:
        pytest.skip("this network has none")
    common = [] if op == Op.SAMPLE else EVERY_OP
    for path, value in [*common, *BAD_FIELDS[op]]:
        changed = recorded.copy()
        set_field(changed[at], path, value)
        with pytest.raises(ValueError, match=r"\w"):
            parts.build(changed)
            pytest.fail(f"{op.name} with {path} = {value} was taken")


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": BIG},
        {"max_sequences": 0},
        {"max_logit_rows": -1},
        {"max_positions": 0},
        {"vocab": 0},
        {"vocab": BIG},
        {"block_bytes": []},
        {"block_bytes": [0, 0]},
        {"block_bytes": [-64, 64]},
        {"block_bytes": [64, 64]},
        {"threads": 0},
        {"threads": -1},
        {"threads": 257},
        {"isa": "sse"},
        {"isa": "AVX512"},
        {"max_tokens": 4100},
        {"max_logit_rows": 9},
    ],
    ids=str,
)
def test_malformed_limits_are_refused(parts: Parts, limits: dict[str, Any]) -> None:
    """No threads waited for each other for ever; blocks of no bytes divided by zero."""
    with pytest.raises(ValueError, match=r"\w"):
        parts.build(**limits)


def test_malformed_bases_are_refused(parts: Parts, runner: CpuRunner) -> None:
    program = _native.Program(
        parts.recording.instructions.tobytes(),
        max_tokens=40,
        max_sequences=8,
        max_logit_rows=8,
        max_positions=64,
        vocab=parts.arch.vocab_size,
        block_bytes=parts.block_bytes,
        isa=chosen_isa(),
        threads=1,
    )
    with pytest.raises(ValueError, match="batch"):  # nothing is bound yet
        run(program, good_batch(runner))
    weights, scratch, *kv = parts.bases()
    off = np.zeros(scratch.size + 1, np.uint8)[1:]
    for bases in (
        [],
        [weights, scratch],
        [weights, scratch, *kv, kv[0]],
        [weights[:-4096], scratch, *kv],
        [weights, scratch[:-64], *kv],
        [weights, off, *kv],
        [weights, scratch.view(np.float32), *kv],
        [weights, np.zeros(2 * scratch.size, np.uint8)[::2], *kv],
    ):
        with pytest.raises((ValueError, TypeError)):
            program.bind(bases)
    program.bind([weights, scratch, np.zeros(63, np.uint8), *kv[1:]])
    with pytest.raises(ValueError, match="pool"):
        run(program, good_batch(runner))
    program.bind(parts.bases())
    run(program, good_batch(runner))


def test_instructions_come_whole(parts: Parts) -> None:
    assert INSTRUCTION.itemsize == _native.INSTRUCTION_BYTES
    with pytest.raises(ValueError, match="whole number"):
        _native.Program(
            b"x" * 17,
            max_tokens=1,
            max_sequences=1,
            max_logit_rows=1,
            max_positions=1,
            vocab=1,
            block_bytes=[64],
            isa="portable",
            threads=1,
        )


PATHS = [
    *["op", "logit_rows", "kv_group", "input.base", "input.offset", "output.base", "output.offset"],
    *["output2.base", "output2.offset", "weight.base", "weight.offset", "weight2.base", "weight2.offset"],
    *[
        "input_stride",
        "output_stride",
        "kv_offset",
        "format.kind",
        "format.scale_bytes",
        "format.offsets",
    ],
    *["format.group", "format.zero_point", "i0", "i1", "i2", "i3", "heads", "kv_heads", "head_dim", "window"],
    *["q_offset", "k_offset", "v_offset"],
]
FIELDS_OF_64_BITS = ("input.offset", "output.offset", "output2.offset", "weight.offset", "weight2.offset")


@fuzz
@given(data=st.data())
def test_random_instructions_never_crash(parts: Parts, runner: CpuRunner, data: st.DataObject) -> None:
    """What is not refused runs, whatever it computes, within the memory that it was given."""
    changed = parts.recording.instructions.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        row = changed[data.draw(st.integers(0, len(changed) - 1))]
        path = data.draw(st.sampled_from(PATHS))
        small = st.one_of(
            st.integers(-1, 40),
            st.integers(-70, 5000),
            st.sampled_from([64, 96, 128, 256, BIG, SMALL, 1 << 20]),
        )
        wide = path in FIELDS_OF_64_BITS or path.endswith("stride") or path == "kv_offset"
        if wide:
            top = parts.recording.scratch_bytes
            small = st.one_of(
                small, st.integers(-8, top + 64).map(lambda x: x // 4 * 4), st.integers(-HUGE, HUGE)
            )
        set_field(row, path, data.draw(small))
    try:
        program = parts.build(changed)
    except ValueError:
        return
    run(program, good_batch(runner))


def test_profile(parts: Parts, runner: CpuRunner) -> None:
    """Seconds per instruction, since the last time it was asked for."""
    program = parts.build()
    run(program, good_batch(runner))
    assert not any(program.take_profile())
    program.set_profiling(True)
    run(program, good_batch(runner))
    seconds = program.take_profile()
    assert len(seconds) == len(parts.recording.instructions)
    assert all(
        s > 0 for s, i in zip(seconds, parts.recording.instructions, strict=True) if i["op"] == Op.MATMUL
    )
    assert not any(program.take_profile())
