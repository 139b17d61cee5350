"""Other engines on what we wrote: HEADRACE_TEST_PEERS=1, and the environments that make bench-peers makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.lab.compress.convert import Rounding, Target, convert
from headrace.paths import cache_dir

PROMPTS = ["The capital of France is", "Water flows down to the mill because", "One, two, three, four,"]
TOKENS = 12

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=256, max_num_seqs=4, enforce_eager=True)
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
outputs = llm.generate(json.loads(sys.argv[3]), params, use_tqdm=False)
print("ANSWERS " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
LLAMA_CPP = """
import json, sys, urllib.request
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_gpu_layers = sys.argv[1], 512, 0
server = xllamacpp.Server(params)
answers = []
for prompt in json.loads(sys.argv[3]):
    body = {"prompt": prompt, "n_predict": int(sys.argv[2]), "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        server.listening_address + "/completion",
        json.dumps(body | {"return_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )
    answers.append(json.load(urllib.request.urlopen(request))["tokens"])
print("ANSWERS " + json.dumps(answers))
"""


def python_of(peer: str) -> Path:
    """The Python of an environment that has another engine."""
    if not os.environ.get("HEADRACE_TEST_PEERS"):
        pytest.skip("HEADRACE_TEST_PEERS is not set")
    python = cache_dir() / "peers" / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment of {peer}: make bench-peers makes one")
    return python


def answers_of(python: Path, program: str, model: Path) -> list[list[int]]:
    """Another engine's greedy tokens."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python), "-c", program, str(model), str(TOKENS), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-3000:]
    found: list[list[int]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("peer", "program", "target", "rounding"),
    [
        ("vllm", VLLM, "compressed-tensors", "int4"),
        ("vllm", VLLM, "compressed-tensors", "w8a8"),
        ("llama.cpp", LLAMA_CPP, "gguf-q4_0", None),
        ("llama.cpp", LLAMA_CPP, "gguf-q4_1", None),
        ("llama.cpp", LLAMA_CPP, "gguf-q8_0", None),
        ("llama.cpp", LLAMA_CPP, "gguf-f16", None),
    ],
)
def test_they_say_what_we_say(
    tmp_path: Path, peer: str, program: str, target: Target, rounding: Rounding | None
) -> None:
    """The same first tokens as ours: later ones part where two are nearly as likely."""
    python = python_of(peer)
    floats, folder = tmp_path / "floats", tmp_path / "model"
    convert("smollm2-135m", "bf16", floats)
    convert(str(floats), target, folder, rounding=rounding)
    theirs = answers_of(python, program, next(folder.glob("*.gguf"), folder))
    with LLM(str(folder), max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        ours = [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, params)]
    pairs = list(zip(ours, theirs, strict=True))
    same = [next((at for at in range(TOKENS) if x[at] != y[at]), TOKENS) for x, y in pairs]
    assert min(same) >= 1, (same, pairs)
    assert sum(same) >= TOKENS, (same, pairs)
