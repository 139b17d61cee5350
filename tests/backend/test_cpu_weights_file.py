"""The packed weights on disk: hit, damage, disks without room, two writers at once."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.weights_file import PackedWeights, packed_weights
from headrace.errors import HeadraceError, ModelFormatError
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from tests.model.tiny import CASES

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("model")
    CASES["qwen3"](made)
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path / "packed"


def load(folder: Path) -> PackedWeights:
    checkpoint = SafetensorsCheckpoint(folder)
    return packed_weights(checkpoint, network_graph(checkpoint.architecture))


def packed_file(cache: Path) -> Path:
    (path,) = cache.iterdir()  # and no partial beside it
    return path


def test_the_second_start_maps_what_the_first_one_packed(folder: Path, cache: Path) -> None:
    first = load(folder)
    path = packed_file(cache)
    before = path.stat()
    second = load(folder)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    np.testing.assert_array_equal(first.data, second.data)
    assert first.tensors == second.tensors
    assert not second.data.flags.writeable
    assert all(tensor.offset % 64 == 0 for tensor in second.tensors.values())


def test_quantisation_and_changed_sources_have_files_of_their_own(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    load(folder)
    checkpoint = SafetensorsCheckpoint(folder, quantization="int8")
    packed_weights(checkpoint, network_graph(checkpoint.architecture))
    shutil.copytree(folder, tmp_path / "copy")
    load(tmp_path / "copy")
    assert len(list(cache.iterdir())) == 3


def footer_span(raw: bytes) -> tuple[int, int]:
    length = int.from_bytes(raw[-24:-16], "little")
    return len(raw) - 24 - length, len(raw) - 24


def with_footer(raw: bytes, change: Callable[[dict], None]) -> bytes:
    begin, end = footer_span(raw)
    footer = msgspec.json.decode(raw[begin:end])
    change(footer)
    encoded = msgspec.json.encode(footer)
    return raw[:begin] + encoded + len(encoded).to_bytes(8, "little") + raw[-16:]


def set_entry(name: str, field: int, value: object) -> Callable[[bytes], bytes]:
    """Lie about one field of one tensor: 0 offset, 1 n, 2 k, 3 format."""

    def damage(raw: bytes) -> bytes:
        return with_footer(raw, lambda footer: footer["tensors"][name].__setitem__(field, value))

    return damage


MATRIX, VECTOR = "layers.1.feed_forward.up.weight", "final_norm.weight"
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "short": lambda raw: raw[-10:],
    "garbage": lambda raw: np.random.default_rng(1).bytes(5000),
    "truncated by a byte": lambda raw: raw[:-1],
    "truncated in the middle": lambda raw: raw[: len(raw) // 2],
    "its head cut off": lambda raw: raw[1000:],
    "footer's length huge": lambda raw: raw[:-24] + b"\xff" * 8 + raw[-16:],
    "footer's length zero": lambda raw: raw[:-24] + bytes(8) + raw[-16:],
    "footer is no JSON": lambda raw: raw[: footer_span(raw)[0]] + b"\xfe" + raw[footer_span(raw)[0] + 1 :],
    "footer nests deeply": lambda raw: (
        raw[: footer_span(raw)[0]]
        + (deep := b'{"x":' + b"[" * 100_000)
        + len(deep).to_bytes(8, "little")
        + raw[-16:]
    ),
    "another version": lambda raw: with_footer(raw, lambda footer: footer.update(version=99)),
    "another model": lambda raw: with_footer(raw, lambda footer: footer.update(key="0" * 32)),
    "a tensor missing": lambda raw: with_footer(raw, lambda footer: footer["tensors"].pop(MATRIX)),
    "offset beyond": set_entry(MATRIX, 0, 1 << 40),
    "offset negative": set_entry(MATRIX, 0, -64),
    "offset crooked": set_entry(MATRIX, 0, 1),
    "offset enormous": set_entry(MATRIX, 0, 10**30),
    "fewer rows": set_entry(MATRIX, 1, 16),
    "rows negative": set_entry(MATRIX, 1, -160),
    "more columns": set_entry(MATRIX, 2, 1 << 20),
    "a vector with columns": set_entry(VECTOR, 2, 64),
    "unknown format": set_entry(MATRIX, 3, [9, 2, 0, 32, 8]),
    "format below": set_entry(MATRIX, 3, [-1, 2, 0, 32, 8]),
    "group of zero": set_entry(MATRIX, 3, [0, 2, 0, 0, 8]),
    "scales of three bytes": set_entry(MATRIX, 3, [0, 3, 0, 32, 8]),
    "a quantised vector": set_entry(VECTOR, 3, [0, 2, 0, 32, 8]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_packed_anew(folder: Path, cache: Path, damage: str) -> None:
    good = load(folder)
    path = packed_file(cache)
    raw = path.read_bytes()
    path.unlink()  # the mapping keeps its pages
    path.write_bytes(DAMAGE[damage](raw))
    again = load(folder)
    np.testing.assert_array_equal(again.data, good.data)
    assert again.tensors == good.tensors
    assert packed_file(cache).read_bytes() == raw


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(where=st.integers(0, 4000), byte=st.integers(0, 255))
def test_any_byte_of_the_footer_may_be_wrong(folder: Path, cache: Path, where: int, byte: int) -> None:
    """Either it is noticed, or every tensor still has the shape, format and place that the network needs."""
    path = cache / "x"
    for old in cache.glob("*"):
        path = old
    if not path.exists():
        load(folder)
        path = packed_file(cache)
    raw = bytearray(path.read_bytes())
    at = -1 - where % (len(raw) - footer_span(raw)[0])
    raw[at] = byte
    path.unlink()
    path.write_bytes(raw)
    found = load(folder)
    for tensor in found.tensors.values():
        assert tensor.offset + tensor.size_bytes <= found.data.size


def run_python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


PACK = """
import os, sys
from pathlib import Path
from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.weights_file import packed_weights
from headrace.errors import HeadraceError
from headrace.model.weights.safetensors import SafetensorsCheckpoint
checkpoint = SafetensorsCheckpoint(Path(sys.argv[1]))
nodes = network_graph(checkpoint.architecture)
if len(sys.argv) > 2:
    os.seteuid(int(sys.argv[2]))
try:
    print(len(packed_weights(checkpoint, nodes).tensors))
except HeadraceError as error:
    print(error.message)
    sys.exit(3)
"""


def test_two_processes_pack_at_once(folder: Path, cache: Path) -> None:
    command = [sys.executable, "-c", PACK, str(folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [str(len(load(folder).tensors))] * 2
    assert packed_file(cache).suffix == ".weights"


def test_a_full_disk_says_what_to_do_and_leaves_nothing(folder: Path, cache: Path) -> None:
    """A limit on the size of files fails in the same place as a disk without room."""
    limit = (20_000, 20_000)
    result = run_python(
        PACK, str(folder), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert result.returncode == 3, result.stderr
    assert str(cache) in result.stdout
    assert "HEADRACE_CACHE" in result.stdout
    assert list(cache.iterdir()) == []
    load(folder)


def test_no_folder_can_be_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HeadraceError, match="HEADRACE_CACHE"):
        load(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights up")
@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_that_may_only_be_read(
    folder: Path, cache: Path, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is in it is used; what is not is asked for politely."""
    for part in (cache.parent, *cache.parents):  # pytest's folders are the owner's alone
        if part.is_relative_to("/tmp") and part != Path("/tmp"):
            part.chmod(0o755)
    for part in (folder, *folder.parents):
        if part.is_relative_to("/tmp") and part != Path("/tmp"):
            part.chmod(0o755)
    if packed:
        load(folder)
        packed_file(cache).chmod(0o644)
    result = run_python(PACK, str(folder), "65534")
    if packed:
        assert result.returncode == 0, result.stdout + result.stderr
    else:
        assert result.returncode == 3, result.stdout + result.stderr
        assert "HEADRACE_CACHE" in result.stdout


def test_something_else_in_its_place(folder: Path, cache: Path) -> None:
    load(folder)
    path = packed_file(cache)
    path.unlink()
    (path / "folder").mkdir(parents=True)
    with pytest.raises(HeadraceError, match="HEADRACE_CACHE"):
        load(folder)
    assert [left.name for left in cache.iterdir()] == [path.name]


def test_a_norm_that_is_not_finite_is_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    """It would fail every request; the checkpoint is damaged."""
    from safetensors.numpy import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match="final_norm"):
        load(copy)
    assert list(cache.iterdir()) == []
