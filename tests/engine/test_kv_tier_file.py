"""The second tier's file: good for the next process, and never trusted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from small_engines import Answers, Clock, request, run, small_engine, tokens

from headrace.backend.runner import Runner
from headrace.backend.simulated import SimulatedRunner
from headrace.engine.config import CacheConfig
from headrace.engine.engine import Engine
from headrace.engine.kv_tier import KVTier
from headrace.engine.kv_tier_build import open_tier
from headrace.engine.kv_tier_store import Background
from headrace.errors import ConfigError, OutOfMemoryError

PROMPT = tokens(161, 1)
MIB = 2**-10  # of a GiB
IMPORTS = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "from test_kv_tier_file import EXPECTED, ask, engine_on, tokens\n"
)


def engine_on(path: Path | str, *, swap_space: float = MIB, **settings: Any) -> Engine:
    """A small engine whose second tier is kept in a file."""

    def tier(runner: Runner) -> KVTier:
        cache = CacheConfig(swap_space=swap_space, kv_tier_path=str(path))
        opened = open_tier(cache, runner, "cpu", clock=clock)
        assert opened is not None
        return opened

    clock = Clock()  # on which nothing takes time: everything pays
    settings = {"num_blocks": 12, "max_model_len": 190} | settings
    return small_engine(tier=tier, clock=clock, **settings)


def ask(engine: Engine, prompt: list[int] = PROMPT, salt: str = "") -> tuple[Answers, int]:
    """The answer, and how many tokens of the prompt were found."""
    answers = run(engine, [request("r", prompt, max_tokens=9, ignore_eos=True, logprobs=1, salt=salt)])
    last = answers["r", 0].last
    assert last is not None
    return answers, last.num_cached_tokens


EXPECTED = ask(small_engine())[0].texts()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The file that an engine which has answered PROMPT leaves."""
    path = tmp_path / "blocks.tier"
    engine = engine_on(path)
    ask(engine)
    engine.close()
    return path


def test_the_next_engine_finds_what_the_last_one_had(kept: Path) -> None:
    """After each restart every user's first question took as long as on the first day."""
    engine = engine_on(kept)
    assert engine.stats().num_tier_blocks_used == 10
    answers, found = ask(engine)
    assert found == 160
    assert answers.texts() == EXPECTED
    assert engine.stats().tier_failures == 0
    engine.close()
    third = engine_on(kept)
    assert ask(third)[1] == 160
    third.close()


def test_a_salt_is_part_of_what_is_looked_for(kept: Path) -> None:
    engine = engine_on(kept)
    assert ask(engine, salt="another tenant's")[1] == 0
    engine.close()


def test_nobody_else_may_read_it(kept: Path) -> None:
    """It holds what users have said."""
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("chunk", [4096, 64])
def test_damage_anywhere_is_noticed(kept: Path, chunk: int) -> None:
    """Bytes that a disk has changed were taken for keys and values, and the answer was nonsense."""
    sound = kept.read_bytes()
    hits = []
    for start in range(len(b"headrace KV tier\n"), len(sound), max(chunk, len(sound) // 40)):
        damaged = bytearray(sound)
        for at in range(start, min(start + chunk, len(sound))):
            damaged[at] ^= 0x55
        kept.write_bytes(damaged)
        engine = engine_on(kept)
        answers, found = ask(engine)
        assert answers.texts() == EXPECTED, start
        hits.append(found)
        engine.close()
    assert min(hits) == 0
    assert max(hits) > 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_file_that_ends_too_early(kept: Path, share: float) -> None:
    os.truncate(kept, int(share * kept.stat().st_size))
    engine = engine_on(kept)
    assert ask(engine)[0].texts() == EXPECTED
    engine.close()


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
def test_a_file_of_anything(tmp_path: Path, size: int) -> None:
    """What follows our own beginning may be whatever it likes: no length in it is believed."""
    path = tmp_path / "blocks.tier"
    path.write_bytes(b"headrace KV tier\n" + b"\xff" * size)
    engine = engine_on(path)
    assert ask(engine)[0].texts() == EXPECTED
    engine.close()


def test_a_crash_leaves_a_file_that_the_next_one_can_use(tmp_path: Path) -> None:
    """kill -9 in the middle of whatever it was doing: the rest of the file still serves."""
    path = tmp_path / "blocks.tier"
    program = IMPORTS + (
        f"engine = engine_on({str(path)!r})\n"
        "for number in range(1, 10**6):\n"
        "    ask(engine, tokens(161, number))\n"
        "    print(engine.stats().tier_spills, flush=True)\n"
    )
    for spills in (20, 300):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            while int(child.stdout.readline()) < spills:
                pass
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        engine = engine_on(path)
        assert engine.stats().num_tier_blocks_used > 10
        assert ask(engine)[0].texts() == EXPECTED
        assert engine.stats().tier_failures == 0
        engine.close()


def test_another_model_s_blocks_are_ignored(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    """K and V of another version, format or model are not even looked at; the file starts anew."""

    class Other(SimulatedRunner):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.capabilities = type(self.capabilities)(
                **{
                    name: getattr(self.capabilities, name)
                    for name in ("backend", "isa", "batch_invariant", "kv_dtype", "threads")
                },
                fingerprint="another",
            )

    engine = engine_on(kept, runner=Other)
    assert "of another model, version or size" in caplog.text
    assert engine.stats().num_tier_blocks_used == 0
    assert ask(engine)[1] == 0
    engine.close()
    back = engine_on(kept)
    assert ask(back)[1] == 0
    back.close()


def test_a_size_that_has_changed(kept: Path) -> None:
    engine = engine_on(kept, swap_space=2 * MIB)
    assert engine.stats().num_tier_blocks_used == 0
    assert ask(engine)[0].texts() == EXPECTED
    engine.close()


def test_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "blocks.tier"
    size = 64 * 1024
    engine = engine_on(path, swap_space=size / 2**30)
    for number in range(60):
        ask(engine, tokens(161, number))
    engine.close()
    assert engine.stats().num_tier_blocks_used == engine.stats().num_tier_blocks > 100
    assert size // 2 < path.stat().st_size <= size


def test_a_folder_has_a_file_for_each_model(tmp_path: Path) -> None:
    for _ in range(2):
        engine = engine_on(f"{tmp_path}/new/folder/")
        ask(engine)
        engine.close()
    [path] = (tmp_path / "new/folder").iterdir()
    assert path.name.startswith("kv-") and path.suffix == ".tier"
    engine = engine_on(tmp_path / "new/folder")
    assert ask(engine)[1] == 160
    engine.close()


def test_what_cannot_be_used_is_said(tmp_path: Path, kept: Path) -> None:
    other = tmp_path / "letter.txt"
    other.write_text("Dear Ada, the wheel turns again.")
    with pytest.raises(ConfigError, match="is no KV tier, and is left as it is"):
        engine_on(other)
    assert other.read_text().startswith("Dear Ada")
    with pytest.raises(ConfigError, match="cannot be opened for writing"):
        engine_on(other / "below")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no KV tier"):
        engine_on(tmp_path / "pipe")
    engine = engine_on(kept)
    with pytest.raises(ConfigError, match="in use by another engine"):
        engine_on(kept)
    engine.close()
    with pytest.raises(ConfigError, match=r"swap_space .* one block of this model takes 128 bytes"):
        engine_on(kept, swap_space=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_path_nothing_is_left(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without a name for blocks in host memory, host memory for those of a device."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    clock = Clock()

    def tier(runner: Runner) -> KVTier:
        opened = open_tier(CacheConfig(swap_space=MIB), runner, device, clock=clock)
        assert opened is not None and not opened.is_kept
        return opened

    engine = small_engine(num_blocks=12, max_model_len=190, clock=clock, tier=tier)
    ask(engine)
    ask(engine, tokens(170, 2))
    answers, found = ask(engine)
    assert (answers.texts(), found) == (EXPECTED, 160)
    assert (tmp_path / "cache").exists() == (device == "cpu")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    engine.close()


def test_no_room_for_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemoryError, match=r"swap_space .* is 500000 GiB of host memory, of which"):
        small_engine(tier=lambda runner: open_tier(CacheConfig(swap_space=500_000), runner, "cuda"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"swap_space .* needs a file in .*HEADRACE_CACHE"):
        small_engine(tier=lambda runner: open_tier(CacheConfig(swap_space=1), runner, "cpu"))


def test_a_full_disk_ends_the_spilling_and_nothing_else(tmp_path: Path) -> None:
    """Every block that could not be written was a line in the log, and one of them was the engine's death."""
    program = IMPORTS + (
        f"engine = engine_on({str(tmp_path / 'blocks.tier')!r})\n"
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "for number in range(8):\n"
        "    ask(engine, tokens(161, number))\n"
        "assert ask(engine)[0].texts() == EXPECTED\n"
        "engine.close()\n"
        "print(engine.stats().num_tier_blocks_used)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout == "0\n"
    [line] = ended.stderr.splitlines()
    assert line == ("Nothing is written to the second tier of KV blocks any more: [Errno 27] File too large")


def test_a_worker_does_what_is_urgent_first_and_all_before_it_ends() -> None:
    """Reads that somebody waits for stood behind a minute of writes that nobody did."""
    done: list[int] = []
    worker = Background()
    go = threading.Event()
    worker.submit(go.wait, urgent=False)  # type: ignore[arg-type]
    for number in range(3):
        worker.submit(lambda number=number: done.append(number), urgent=False)  # type: ignore[misc]
    worker.submit(lambda: done.append(9), urgent=True)
    go.set()
    worker.close()
    assert done == [9, 0, 1, 2]
