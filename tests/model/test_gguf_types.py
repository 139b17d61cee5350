"""Every tensor type against the reference package: the same weights to the last bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelFormatError
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.gguf import GGUFFile
from headrace.model.weights.gguf_types import TYPES
from tests.model.gguf_files import STORED_TYPES, description, random_blocks, raw_gguf, write_gguf

EXPECTED = {  # bits, group size, zero point, has a minimum, scale type
    "Q4_0": (4, 32, 8, False, np.float16),
    "Q4_1": (4, 32, 0, True, np.float16),
    "Q5_0": (5, 32, 16, False, np.float16),
    "Q5_1": (5, 32, 0, True, np.float16),
    "Q8_0": (8, 32, 128, False, np.float16),
    "Q4_K": (4, 32, 0, True, np.float32),
    "Q5_K": (5, 32, 0, True, np.float32),
    "Q6_K": (6, 16, 32, False, np.float32),
}


def read_back(path: Path, type_name: str, packed: np.ndarray) -> QuantTensor:
    write_gguf(path, {"general.architecture": "any"}, {"w": (type_name, packed)})
    tensor = GGUFFile(path).tensor("w")
    assert isinstance(tensor, QuantTensor)
    return tensor


def test_block_sizes_are_those_of_the_reference() -> None:
    for number, kind in TYPES.items():
        reference = GGMLQuantizationType(number)
        assert kind.name == reference.name
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[reference]


@pytest.mark.parametrize("type_name", STORED_TYPES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), blocks=st.integers(1, 5))
def test_random_blocks_dequantise_bit_for_bit(type_name: str, seed: int, rows: int, blocks: int) -> None:
    kind = GGMLQuantizationType[type_name]
    columns = blocks * gguf.GGML_QUANT_SIZES[kind][0]
    packed = random_blocks(np.random.default_rng(seed), type_name, rows, columns)
    with tempfile.TemporaryDirectory() as folder:
        tensor = read_back(Path(folder) / "w.gguf", type_name, packed)
    bits, group_size, zero_point, has_minimum, scale_type = EXPECTED[type_name]
    assert tensor.shape == (rows, columns)
    assert (tensor.bits, tensor.group_size, tensor.zero_point) == (bits, group_size, zero_point)
    assert tensor.codes.max() < 2**bits
    assert tensor.scale.shape == (rows, columns // group_size)
    assert tensor.scale.dtype == scale_type
    assert (tensor.minimum is not None) == has_minimum
    np.testing.assert_array_equal(tensor.dequantize(), gguf.quants.dequantize(packed, kind))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_real_weights_survive_the_reference_quantiser(type_name: str, tmp_path: Path) -> None:
    weights = np.random.default_rng(1).normal(scale=0.05, size=(33, 96)).astype(np.float32)
    packed = gguf.quants.quantize(weights, GGMLQuantizationType[type_name])
    tensor = read_back(tmp_path / "w.gguf", type_name, packed)
    worst_step = tensor.scale.astype(np.float32).__abs__().max()
    assert np.abs(tensor.dequantize() - weights).max() <= worst_step


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K"])
def test_large_tensors_are_unpacked_in_parts_that_fit_together(type_name: str, tmp_path: Path) -> None:
    packed = random_blocks(np.random.default_rng(2), type_name, 1111, 2304)  # over 1 MiB, an odd last part
    tensor = read_back(tmp_path / "w.gguf", type_name, packed)
    reference = gguf.quants.dequantize(packed, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(tensor.dequantize(), reference)


def test_floats_are_views_of_the_file(tmp_path: Path) -> None:
    weights = np.random.default_rng(3).normal(size=(3, 5)).astype(np.float32)
    brain = weights.astype(ml_dtypes.bfloat16)
    path = write_gguf(
        tmp_path / "w.gguf",
        {"general.architecture": "any"},
        {"f32": weights, "f16": weights.astype(np.float16), "bf16": ("BF16", brain.view(np.uint8))},
    )
    file = GGUFFile(path)
    for name, expected in (("f32", weights), ("f16", weights.astype(np.float16)), ("bf16", brain)):
        tensor = file.tensor(name)
        assert isinstance(tensor, np.ndarray)
        assert tensor.dtype == expected.dtype
        assert not tensor.flags.writeable
        np.testing.assert_array_equal(tensor, expected)


def test_floats_outlive_their_file_object(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "w.gguf", {"general.architecture": "any"}, {"w": np.ones(9, np.float32)})
    tensor = GGUFFile(path).tensor("w")
    path.unlink()
    assert np.asarray(tensor).sum() == 9


@pytest.mark.parametrize(
    ("number", "shown"), [(10, "Q2_K"), (20, "IQ4_NL"), (4, "unknown type 4"), (2**31, "2147")]
)
def test_other_types_are_named_with_what_would_do(number: int, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    path.write_bytes(raw_gguf([], [description(b"blk.0.odd", [256, 1], number, 0)], bytes(512)))
    with pytest.raises(ModelFormatError, match=rf"blk\.0\.odd is stored as .*{shown}.*Q4_K"):
        GGUFFile(path)


@pytest.mark.parametrize(("type_name", "at"), [("Q4_0", 0), ("Q4_1", 2), ("Q5_K", 2), ("Q6_K", 208)])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_scales_that_are_not_finite_are_refused(
    type_name: str, at: int, value: float, tmp_path: Path
) -> None:
    packed = random_blocks(np.random.default_rng(4), type_name, 4, 256)
    packed[2, at : at + 2] = np.array([value], "<f2").view(np.uint8)
    packed[2, 4:16] = 0xFF if type_name == "Q5_K" else packed[2, 4:16]  # zero times infinity is NaN anyway
    with pytest.raises(ModelFormatError, match="tensor w has scales"):
        read_back(tmp_path / "w.gguf", type_name, packed)
