"""vLLM on folders that we wrote: HEADRACE_TEST_VLLM=1, and the environment that make bench-peers makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.lab.compress.convert import Rounding, convert
from headrace.paths import cache_dir

PROMPTS = ["The capital of France is", "Water flows down to the mill because", "One, two, three, four,"]
TOKENS = 12

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=256, max_num_seqs=4, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
outputs = llm.generate(json.loads(sys.argv[3]), params, use_tqdm=False)
print("ANSWERS " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module")
def vllm() -> Path:
    """The Python of an environment that has vLLM."""
    python = cache_dir() / "peers" / "vllm" / "bin" / "python"
    if not os.environ.get("HEADRACE_TEST_VLLM"):
        pytest.skip("HEADRACE_TEST_VLLM is not set")
    if not python.exists():
        pytest.skip("no environment of vLLM: make bench-peers makes one")
    return python


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounding", ["int4", "w8a8"])
def test_vllm_serves_what_we_write(vllm: Path, tmp_path: Path, rounding: Rounding) -> None:
    """The same first tokens as ours: later ones part where two are nearly as likely."""
    folder = tmp_path / "model"
    convert("smollm2-135m", "compressed-tensors", folder, rounding=rounding)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(vllm), "-c", PROGRAM, str(folder), str(TOKENS), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-3000:]
    theirs = json.loads(lines[0].removeprefix("ANSWERS "))
    with LLM(str(folder), max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        ours = [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, params)]
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), TOKENS)
        for x, y in zip(ours, theirs, strict=True)
    ]
    assert sum(same) >= TOKENS, (same, ours, theirs)
    assert min(same) >= 1, (same, ours, theirs)
