"""headrace bench --profile: where steps spend their time, and how far from the machine's limits that is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.backend.cpu.instruction import INSTRUCTION, Op
from headrace.backend.cpu.limits import Limits
from headrace.backend.cpu.profile import OpProfile, profile_of
from headrace.cli.main import app
from headrace.errors import ConfigError
from headrace.lab.profile import STEPS, StepKind, least_seconds, profile_model
from tests.backend.batches import Piece, batch_of
from tests.lab.small_models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def test_bytes_and_products_are_those_of_the_shapes() -> None:
    """Two sequences, of 3 new tokens after none and of 1 after 40; a window of 16 in the second layer."""
    batch = batch_of([Piece([1, 2, 3], 0, [0]), Piece([4], 40, [1, 2, 3])])
    instructions = np.zeros(4, INSTRUCTION)
    matmul, head, full, windowed = instructions
    for row in (matmul, head):
        row["op"], row["i0"], row["i1"] = Op.MATMUL, 40, 64  # 40 outputs are three tiles of 16
        row["format"]["scale_bytes"], row["format"]["group"] = 2, 32
        row["format"]["offsets"] = 1
    head["logit_rows"], head["format"]["kind"] = 1, 1  # eight bits
    for row in (full, windowed):
        row["op"], row["heads"], row["kv_heads"], row["head_dim"] = Op.ATTENTION, 4, 2, 8
    windowed["window"] = 16
    found = {kind.kind: kind for kind in profile_of(instructions, [4.0, 2.0, 1.0, 2.0], batch, steps=2)}
    assert found["matmul"].macs == 4 * 40 * 64
    assert found["matmul"].read_bytes == 3 * 2 * (256 + 2 * 32)
    assert found["output head"].macs == 2 * 40 * 64
    assert found["output head"].read_bytes == 3 * 2 * (512 + 2 * 32)
    seen_full, seen_window = 1 + 2 + 3 + 41, 1 + 2 + 3 + 16
    assert found["attention"].macs == (seen_full + seen_window) * 4 * 8 * 2
    # K and V of two heads of eight, two bytes each; the windowed layer keeps what its window reaches
    assert found["attention"].read_bytes == ((3 + 41) + (3 + 16)) * 2 * 8 * 2 * 2
    assert [kind.seconds for kind in profile_of(instructions, [4.0, 2.0, 1.0, 2.0], batch, 2)] == [
        2.0,
        1.5,
        1.0,
    ]


def test_the_limit_is_the_slower_of_reading_and_multiplying() -> None:
    limits = Limits("x", 1, {1000: 100.0}, 10.0, 20.0, 5.0, 10.0)
    assert least_seconds(OpProfile("matmul", "int8", 9.0, 200, 10), limits, 1000) == 2.0
    assert least_seconds(OpProfile("attention", "bf16", 9.0, 200, 100), limits, 1000) == 5.0
    assert least_seconds(OpProfile("norm", "", 9.0), limits, 1000) == 0.0


def test_a_profile_of_a_model(folder: Path) -> None:
    steps = (StepKind("one", 1, 1, 30), StepKind("many", 4, 8, 8), StepKind("too long", 1, 1, 10**6))
    profile = profile_model(folder, name="small", threads=1, seconds=0.05, steps=steps)
    assert [found.step for found in profile.steps] == list(steps[:2])
    for found in profile.steps:
        kinds = {operation.kind for operation in found.operations}
        assert {"matmul", "output head", "attention", "norm", "sample"} <= kinds
        assert sum(found.least_seconds) > 0
        assert found.seconds == pytest.approx(sum(operation.seconds for operation in found.operations))


def test_what_cannot_be_profiled_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context"):
        profile_model(folder, name="small", steps=(StepKind("long", 1, 1, 10**6),))


def test_from_the_command_line(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    command = ["bench", str(smollm2_path), "--profile", "--serve", "--threads 1", "--output", str(output)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for step in STEPS:
        assert step.name in done.output
    assert "of the limit" in done.output and "attention" in done.output
    written = json.loads(output.read_text())
    assert written["limits"]["threads"] == 1
    assert [found["step"]["name"] for found in written["steps"]] == [step.name for step in STEPS]


@pytest.mark.parametrize("serve", ["--port 1", "--threads", "--threads two", "--quantization int3"])
def test_other_options_are_refused(folder: Path, serve: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(folder), "--profile", "--serve", serve])
    assert isinstance(done.exception, ConfigError) and "--threads N" in done.exception.message


def test_an_address_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "http://127.0.0.1:9", "--profile"])
    assert isinstance(done.exception, ConfigError) and "MODEL" in done.exception.message
