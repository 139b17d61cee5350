"""On layers of a real model: what looks at inputs prunes better, on text held out, in pairs of stretches."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.lab.compress.quantize import Asked, Quantization
from headrace.lab.evaluate.divergence import Divergence
from headrace.lab.evaluate.statistics import compare_amounts
from tests.lab.compressing import make_float_smollm2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> dict[str, Divergence]:
    folder = tmp_path_factory.mktemp("pruned")
    make_float_smollm2(folder / "model", smollm2_path, layers=2)
    divergences = {}
    for name in ("magnitude-50", "wanda-50", "sparsegpt-50"):
        asked = Asked(
            model=str(folder / "model"),
            recipe=name,
            output=folder / name,
            samples=16,
            sequence_length=128,
            tokens=192,
            backend="torch",
        )
        text = Quantization(asked).run().text()
        assert text is not None and text.divergence is not None
        divergences[name] = text.divergence
    return divergences


@pytest.mark.parametrize("better", ["wanda-50", "sparsegpt-50"])
def test_inputs_tell_which_weights_matter(better: str, found: dict[str, Divergence]) -> None:
    compared = compare_amounts(found[better].kl_stretches, found["magnitude-50"].kl_stretches, seed=0)
    assert compared.high < 0  # of the 95% interval of the paired difference
