"""What a fresh process takes until its first token: which modules, which files, how much memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's account of memory"),
]

_PROGRAM = """
import json, sys
from headrace import LLM, CacheConfig, SamplingParams
LLM.generate  # the import itself is lazy
imported = sorted(sys.modules)
llm = LLM(sys.argv[1], threads=2, cache_config=CacheConfig(kv_cache_memory_bytes=8 << 20))
llm.generate(["The capital of France is"], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
mapped, name = {}, ""
for line in open("/proc/self/smaps"):
    key, *values = line.split()
    if not key.endswith(":"):
        name = values[4] if len(values) > 4 else ""
    elif key == "Rss:":
        mapped[name] = mapped.get(name, 0) + 1024 * int(values[0])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "imported": imported,
    "modules": sorted(sys.modules),
    "mapped": mapped,
    "peak_bytes": 1024 * int(status["VmHWM"].split()[0]),
}))
"""


class FirstToken(msgspec.Struct):
    """``imported``: modules once LLM was; ``modules``, ``mapped`` (bytes resident by file): at the token."""

    imported: list[str]
    modules: list[str]
    mapped: dict[str, int]
    peak_bytes: int


@pytest.fixture(scope="module")
def started(smollm2_path: Path) -> FirstToken:
    """A process whose files were converted and packed by one before it."""
    command = [sys.executable, "-c", _PROGRAM, str(smollm2_path)]
    subprocess.run(command, check=True, capture_output=True)
    return msgspec.json.decode(
        subprocess.run(command, check=True, capture_output=True).stdout, type=FirstToken
    )


def test_the_first_token_takes_little_memory(started: FirstToken) -> None:
    """The weights are 97 MB of it, the KV pool 8."""
    assert started.peak_bytes < 200e6, f"{started.peak_bytes / 1e6:.0f} MB"


def test_weights_are_held_once(started: FirstToken, smollm2_path: Path) -> None:
    """The packed file, with the embedding that is the head, too; the file it was made of is closed."""
    assert str(smollm2_path) not in started.mapped
    [packed] = [size for name, size in started.mapped.items() if name.endswith(".weights")]
    assert packed <= 1.01 * smollm2_path.stat().st_size


def test_what_a_start_does_not_need_is_not_imported(started: FirstToken) -> None:
    """numpy, which the tokenizer does not wait for, comes with the engine."""
    assert "headrace.frontend.llm" in started.imported
    assert not {"numpy", "tokenizers", "headrace.engine.engine"} & set(started.imported)
    elsewhere = {
        *["ml_dtypes", "asyncio", "jinja2", "huggingface_hub", "pydantic", "psutil", "rich"],
        *["headrace.engine.journal", "headrace.engine.draft_model", "headrace.frontend.gguf_tokenizer"],
    }
    assert not elsewhere & set(started.modules)


def test_a_command_imports_no_other() -> None:
    """Making all commands takes longer than reading a model."""
    program = (
        "import sys\n"
        "from headrace.cli.main import app\n"
        "try: app(['serve', '--help'])\n"
        "finally: print(*sorted(m for m in sys.modules if m.startswith('headrace.cli.')), file=sys.stderr)"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "--max-num-seqs" in run.stdout
    names = {name.removeprefix("headrace.cli.") for name in run.stderr.split()}
    assert "serve" in names
    assert not names & {"bench", "chat", "compress", "diagnose", "doctor", "eval", "gateway", "plan", "tune"}
