"""On layers of a real model, off the 4-bit grid: what should lose less loses less, on text held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.lab.compress.calibration_data import PLAYS as CALIBRATED
from headrace.lab.compress.quantize import Asked, Quantization
from headrace.lab.compress.report import CompressReport
from headrace.lab.evaluate.gate import DEFAULT_GATE
from headrace.lab.evaluate.texts import PLAYS
from tests.lab.compressing import make_float_smollm2

_ROUND = "- {{step: round, method: {method}, group_size: {size}, symmetric: {symmetric}}}"
RECIPES = {
    "symmetric": _ROUND.format(method="rtn", size=64, symmetric="true"),
    "rtn": _ROUND.format(method="rtn", size=64, symmetric="false"),
    "fine": _ROUND.format(method="rtn", size=32, symmetric="false"),
    "rows": _ROUND.format(method="rtn", size=-1, symmetric="false"),
    "gptq": "- {step: round, method: gptq, group_size: 64, symmetric: false, act_order: static}",
    "awq": "- {step: awq}\n" + _ROUND.format(method="rtn", size=64, symmetric="false"),
    "rtn-int8": "- {step: round, bits: 8, group_size: 64}",
    "gptq-int8": "- {step: round, method: gptq, bits: 8, group_size: 64, act_order: static}",
    "w8a8": "- {step: smoothquant}\n- {step: round, bits: 8, group_size: -1, "
    "input_activations: dynamic-token}",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> dict[str, CompressReport]:
    folder = tmp_path_factory.mktemp("smollm2")
    make_float_smollm2(folder / "model", smollm2_path, layers=4)
    found = {}
    for name, steps in RECIPES.items():
        (folder / f"{name}.yaml").write_text(f"steps:\n{steps}\n")
        asked = Asked(
            model=str(folder / "model"),
            recipe=str(folder / f"{name}.yaml"),
            output=folder / name,
            samples=12,
            sequence_length=128,
            tokens=256,
            backend="torch",
            threads=1,
        )
        found[name] = Quantization(asked).run()
    return found


def kl(report: CompressReport) -> float:
    text = report.text()
    assert text is not None and text.divergence is not None
    return text.divergence.kl.value


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("rtn", "symmetric"),
        ("fine", "rtn"),
        ("rtn", "rows"),
        ("gptq", "rtn"),
        ("awq", "rtn"),
        ("rtn-int8", "fine"),
        ("gptq-int8", "rtn-int8"),
        ("w8a8", "fine"),
    ],
)
def test_orderings(better: str, worse: str, reports: dict[str, CompressReport]) -> None:
    assert kl(reports[better]) < kl(reports[worse])


def test_bars(reports: dict[str, CompressReport]) -> None:
    assert kl(reports["rtn-int8"]) < 0.001
    assert kl(reports["w8a8"]) < 0.01
    assert reports["symmetric"].size.rounded_share < 0.28
    assert reports["rtn-int8"].size.rounded_share < 0.52


def test_the_default_gate_refuses_4_bits(reports: dict[str, CompressReport]) -> None:
    evaluation = reports["rtn"].evaluation
    assert evaluation is not None
    assert any("kl_mean" in failure for failure in DEFAULT_GATE.failures(evaluation))


def test_calibration_and_evaluation_share_no_work(reports: dict[str, CompressReport]) -> None:
    assert not set(PLAYS) & set(CALIBRATED)
    about = reports["gptq"].calibration
    assert about is not None
    assert (about["sequences"], about["tokens"], about["chat_template"]) == (12, 12 * 128, True)
    assert "lm-eval 0.4.13" in about["source"]
