"""The GGUF reader from outside: what honest files say, and what happens to dishonest ones."""

from __future__ import annotations

import pickle
import struct
import tempfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.gguf import GGUFFile
from tests.model.gguf_files import (
    array,
    description,
    pair,
    random_blocks,
    raw_gguf,
    text,
    tiny_metadata,
    tiny_tensors,
    write_gguf,
)

U32, STRING, ARRAY = 4, 8, 9


def opened(content: bytes, folder: Path) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_every_type_of_metadata_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "any")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("words", "Grüße, 世界 🌍")
    writer.add_array("strings", ["", "a", "né", "🌍" * 100])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("bools", [True, False, True])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    plain = {key: value for key, value in metadata.items() if not isinstance(value, np.ndarray)}
    assert plain == {
        "general.architecture": "any",
        **{"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31)},
        **{"u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "no": False},
        "words": "Grüße, 世界 🌍",
        "strings": ["", "a", "né", "🌍" * 100],
    }
    assert metadata["yes"] is True
    assert metadata["ints"].dtype == np.int32
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.5, -0.25]
    assert metadata["bools"].dtype == np.bool_
    assert metadata["bools"].tolist() == [True, False, True]
    assert metadata.array_length("strings") == 4
    assert metadata.array_length("ints") == 3
    assert metadata.array_length("words") is None
    assert "absent" not in metadata
    assert metadata.get("absent") is None


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
@pytest.mark.parametrize("version", [2, 3])
def test_tensors_lie_where_version_and_alignment_say(
    alignment: int | None, version: int, tmp_path: Path
) -> None:
    tensors = tiny_tensors()
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors, alignment=alignment)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", version)
    file = opened(bytes(content), tmp_path)
    assert list(file.tensors) == list(tensors)
    for name, expected in tensors.items():
        info = file.tensors[name]
        assert (info.name, info.shape, info.type.name, info.size) == (
            name,
            expected.shape,
            "F32",
            expected.nbytes,
        )
        assert info.offset % (alignment or 32) == 0
        np.testing.assert_array_equal(file.tensor(name), expected)


def test_a_large_vocabulary_costs_little_until_it_is_read(tmp_path: Path) -> None:
    """gemma3 has 262,144 tokens; readers that decode while opening take seconds."""
    tokens = [f"▁token{number}" for number in range(262_144)]
    strings = b"".join(text(token.encode()) for token in tokens)
    content = raw_gguf(
        [
            pair(b"tokens", ARRAY, array(STRING, len(tokens), strings)),
            pair(b"scores", ARRAY, array(6, len(tokens), bytes(4 * len(tokens)))),
            pair(b"after", U32, struct.pack("<I", 7)),
        ]
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    metadata = GGUFFile(path).metadata
    assert tracemalloc.get_traced_memory()[1] < 200_000  # nothing decoded
    tracemalloc.stop()
    opening = min(_seconds(lambda: GGUFFile(path)) for _ in range(3))
    decoding = min(_seconds(lambda: GGUFFile(path).metadata["tokens"]) for _ in range(3))
    assert opening < 0.3  # 0.035 s on an idle 2-core machine; the bound leaves room for a busy one
    assert decoding < 1.2  # 0.11 s
    assert metadata["after"] == 7
    assert metadata.array_length("tokens") == len(tokens)
    assert metadata["tokens"] == tokens
    assert metadata["tokens"] is metadata["tokens"]


def _seconds(action: object) -> float:
    assert callable(action)
    start = time.process_time()  # of this process alone: other load does not count
    action()
    return time.process_time() - start


HUGE = 2**64 - 1
W = description(b"w", [8], 0, 0)
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "header only begun": (b"GGUF\3\0\0\0", "8 bytes"),
    "another magic": (raw_gguf(magic=b"GGML"), "starts with b'GGML'"),
    "version 1": (raw_gguf(version=1), "version 1; versions 2 and 3"),
    "version 4": (raw_gguf(version=4), "version 4"),
    "big-endian": (raw_gguf(version=3 << 24), "big-endian"),
    "lying tensor count": (raw_gguf(tensor_count=HUGE), "claims 18446744073709551615 tensors"),
    "many tensors, none there": (raw_gguf(tensor_count=1000), "ends inside|is 0 bytes long"),
    "lying key count": (raw_gguf(key_count=HUGE), "claims 18446744073709551615 metadata keys"),
    "many keys, none there": (raw_gguf(key_count=1000), "ends inside|is 0 bytes long"),
    "lying key length": (raw_gguf([text(b"key", HUGE)]), "metadata key 0 is 18446744073709551615 bytes long"),
    "long key length": (raw_gguf([text(b"key", 60000)]), "ends inside the name of metadata key 0"),
    "empty key": (raw_gguf([pair(b"", U32, b"1234")]), "metadata key 0 is 0 bytes long"),
    "key not UTF-8": (raw_gguf([pair(b"\xff\xfe", U32, b"1234")]), "metadata key 0 is not UTF-8"),
    "key twice": (raw_gguf([pair(b"k", U32, b"1234")] * 2), "k appears twice"),
    "unknown value type": (raw_gguf([pair(b"k", 13, b"1234")]), "k has unknown type 13"),
    "lying string length": (raw_gguf([pair(b"k", STRING, text(b"abc", HUGE))]), "ends inside k"),
    "nested array": (raw_gguf([pair(b"k", ARRAY, array(ARRAY, 1, b""))]), "array of type 9"),
    "array of unknown type": (raw_gguf([pair(b"k", ARRAY, array(77, 1, b""))]), "array of type 77"),
    "lying array length": (raw_gguf([pair(b"k", ARRAY, array(6, HUGE, b"1234"))]), "elements of k"),
    "array length that overflows": (
        raw_gguf([pair(b"k", ARRAY, array(12, 2**61, b"1234"))]),
        "elements of k",
    ),
    "lying string count": (
        raw_gguf([pair(b"k", ARRAY, array(STRING, HUGE, b""))]),
        "more than any vocabulary",
    ),
    "large string count": (raw_gguf([pair(b"k", ARRAY, array(STRING, 10**6, b""))]), "1000000 strings of k"),
    "string runs out": (
        raw_gguf([pair(b"k", ARRAY, array(STRING, 3, text(b"a") + text(b"b", 10**6) + text(b"c")))]),
        "strings of k run past its end",
    ),
    "last string runs out": (
        raw_gguf([pair(b"k", ARRAY, array(STRING, 2, text(b"a") + text(b"b", 2000)))], data=bytes(64)),
        "strings of k run past its end",
    ),
    "string length that wraps": (
        raw_gguf([pair(b"k", ARRAY, array(STRING, 3, text(b"a", HUGE) + text(b"b", HUGE) + bytes(64)))]),
        "strings of k run past its end",
    ),
    "alignment zero": (
        raw_gguf([pair(b"general.alignment", U32, struct.pack("<I", 0))], [W]),
        "alignment is 0",
    ),
    "alignment odd": (
        raw_gguf([pair(b"general.alignment", U32, struct.pack("<I", 24))], [W]),
        "alignment is 24",
    ),
    "alignment huge": (
        raw_gguf([pair(b"general.alignment", U32, struct.pack("<I", 1 << 31))], [W]),
        "alignment",
    ),
    "alignment a string": (
        raw_gguf([pair(b"general.alignment", STRING, text(b"32"))], [W]),
        "alignment is '32'",
    ),
    "no dimensions": (raw_gguf([], [description(b"w", [], 0, 0)], bytes(64)), "w has 0 dimensions"),
    "five dimensions": (raw_gguf([], [description(b"w", [1] * 5, 0, 0)], bytes(64)), "w has 5 dimensions"),
    "lying rank": (raw_gguf([], [description(b"w", [1], 0, 0, rank=2**32 - 1)], bytes(64)), "dimensions"),
    "zero dimension": (
        raw_gguf([], [description(b"w", [4, 0], 0, 0)], bytes(64)),
        "no dimension may be zero",
    ),
    "huge dimension": (raw_gguf([], [description(b"w", [HUGE], 0, 0)], bytes(64)), "w needs"),
    "product overflows": (raw_gguf([], [description(b"w", [2**32] * 4, 0, 0)], bytes(64)), "w needs"),
    "half a block": (raw_gguf([], [description(b"w", [48, 2], 2, 0)], bytes(64)), "rows of 48, but Q4_0"),
    "lying offset": (raw_gguf([], [description(b"w", [8], 0, HUGE - 31)], bytes(64)), "w needs 32 bytes"),
    "offset unaligned": (raw_gguf([], [description(b"w", [8], 0, 4)], bytes(64)), "not a multiple"),
    "data cut short": (raw_gguf([], [W], bytes(31)), "w needs 32 bytes.*truncated"),
    "no data": (raw_gguf([], [W])[:-1], "truncated"),
    "name twice": (raw_gguf([], [W, description(b"w", [8], 0, 32)], bytes(64)), "w appears twice"),
    "overlap": (
        raw_gguf([], [description(b"w", [16], 0, 0), description(b"v", [8], 0, 32)], bytes(64)),
        "w and v overlap",
    ),
    "same place": (raw_gguf([], [W, description(b"v", [8], 0, 0)], bytes(64)), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_and_say_why(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    with pytest.raises(ModelFormatError, match=message) as refusal:
        opened(content, tmp_path)
    assert "model.gguf" in refusal.value.message


@pytest.mark.parametrize("case", [case for case in HOSTILE if "lying" in case or "large" in case])
def test_lies_about_size_allocate_nothing(case: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        opened(HOSTILE[case][0], tmp_path)
    except ModelFormatError:
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def test_a_large_file_of_zeros_does_not_hang(tmp_path: Path) -> None:
    """A sparse file can claim a billion empty strings at no cost to its sender."""
    path = tmp_path / "model.gguf"
    path.write_bytes(raw_gguf([pair(b"k", ARRAY, array(STRING, 2**30, b""))]))
    with path.open("r+b") as handle:
        handle.truncate(2**34)
    with pytest.raises(ModelFormatError, match="more than any vocabulary"):
        GGUFFile(path)


def test_strings_that_are_not_utf8_fail_only_when_read(tmp_path: Path) -> None:
    pairs = [
        pair(b"good", STRING, text(b"yes")),
        pair(b"lone", STRING, text(b"\xff")),
        pair(b"list", ARRAY, array(STRING, 2, text(b"a") + text(b"\xc3"))),
    ]
    metadata = opened(raw_gguf(pairs), tmp_path).metadata
    assert metadata["good"] == "yes"
    for key in ("lone", "list"):
        with pytest.raises(ModelFormatError, match=f"{key} holds a string that is not UTF-8"):
            metadata[key]


def test_quantised_tensors_must_be_matrices(tmp_path: Path) -> None:
    descriptions = [description(b"flat", [32], 8, 0), description(b"cube", [32, 1, 1], 8, 64)]
    file = opened(raw_gguf([], descriptions, bytes(128)), tmp_path)
    for name in ("flat", "cube"):
        with pytest.raises(ModelFormatError, match=f"{name} is stored as Q8_0 but is no matrix"):
            file.tensor(name)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_are_refused_with_the_way_out(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"pickle.*safetensors"):
        opened(pickle.dumps({"weight": list(range(100))}, protocol=protocol), tmp_path)


def test_torch_archives_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.gguf", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": 1}))
    with pytest.raises(ModelFormatError, match=r"pickle.*safetensors"):
        GGUFFile(tmp_path / "model.gguf")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        GGUFFile(tmp_path)


def _sample() -> bytes:
    """A small file with every kind of value and several types of tensors."""
    rng = np.random.default_rng(5)
    tensors: dict[str, np.ndarray | tuple[str, np.ndarray]] = {
        "a": np.ones((2, 4), np.float32),
        "b": ("Q4_1", random_blocks(rng, "Q4_1", 2, 64)),
        "c": ("Q6_K", random_blocks(rng, "Q6_K", 1, 256)),
    }
    metadata = tiny_metadata() | {"tokens": ["a", "bc", "def"], "scores": [0.5, 1.0], "flag": True}
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf", metadata, tensors).read_bytes()


SAMPLE = _sample()


def _survives(content: bytes) -> None:
    """Opening and reading everything either works or raises ModelFormatError."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = opened(content, Path(folder))
        except ModelFormatError:
            return
        for key in file.metadata:
            try:
                file.metadata[key]
            except ModelFormatError:
                continue
        for name in file.tensors:
            try:
                tensor = file.tensor(name)
            except ModelFormatError:
                continue
            with np.errstate(all="ignore"):
                (tensor.dequantize() if isinstance(tensor, QuantTensor) else tensor).sum()


def test_every_truncation_is_survived() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = opened(SAMPLE, Path(folder))
        end = max(info.offset + info.size for info in whole.tensors.values())
        for length in range(end):
            with pytest.raises(ModelFormatError):
                opened(SAMPLE[:length], Path(folder))
        opened(SAMPLE[:end], Path(folder))  # the padding after the last tensor may be missing


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bits_are_survived(flips: list[tuple[int, int]]) -> None:
    content = bytearray(SAMPLE)
    for at, mask in flips:
        content[at] ^= mask
    _survives(bytes(content))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    at=st.integers(0, len(SAMPLE) - 8),
    value=st.sampled_from([0, 1, 31, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]),
)
def test_lying_numbers_anywhere_are_survived(at: int, value: int) -> None:
    _survives(SAMPLE[:at] + struct.pack("<Q", value) + SAMPLE[at + 8 :])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_survived(noise: bytes, with_header: bool) -> None:
    _survives(SAMPLE[:24] + noise if with_header else noise)
