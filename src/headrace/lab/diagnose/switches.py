"""What to try next, in each engine's own words, and the commands that prove whether it helped."""

from __future__ import annotations

import shlex

import msgspec

from headrace.lab.diagnose.measurements import Measurements

# By what is to be changed and by engine; {n} is a number that the finding computes. "" is any other engine.
_WORDS: dict[str, dict[str, str]] = {
    "batch": {
        "headrace": "--max-num-seqs {n}",
        "vllm": "--max-num-seqs {n}",
        "tgi": "--max-batch-size {n}",
        "llama.cpp": "--parallel {n}",
        "": "the limit on sequences that run at once, to {n}",
    },
    "kv": {
        "headrace": "--kv-cache-memory {n}",
        "vllm": "--gpu-memory-utilization 0.95 or --kv-cache-dtype fp8",
        "tgi": "--max-batch-total-tokens {tokens}",
        "llama.cpp": "--ctx-size {tokens}, or --cache-type-k q8_0 --cache-type-v q8_0",
        "": "more memory for the KV cache, or a narrower KV format",
    },
    "threads": {
        "headrace": "--threads {n}",
        "vllm": "VLLM_CPU_OMP_THREADS_BIND=all",
        "llama.cpp": "--threads {n}",
        "": "{n} compute threads",
    },
    "host": {
        "vllm": "--async-scheduling",
        "": "less work on the host for each step: CUDA graphs, asynchronous scheduling, a faster core",
    },
    "waiting": {
        "headrace": "--max-waiting {n}",
        "tgi": "--max-concurrent-requests {n}",
        "vllm": "no limit of vLLM's own: the proxy in front of it",
        "": "the limit on waiting requests, or the account's rate limit",
    },
    "frontend": {
        "headrace": "--engine-process",
        "vllm": "--tokenizer-mode auto (a fast tokenizer), then --api-server-count 2",
        "tgi": "--validation-workers 4",
        "llama.cpp": "--threads-http 4",
        "": "a fast tokenizer, and more frontend processes",
    },
    "weights": {
        "headrace": "--quantization {n}",
        "vllm": "--quantization fp8, or a checkpoint in 4 bits",
        "tgi": "--quantize fp8",
        "llama.cpp": "a GGUF of fewer bits (Q4_K_M)",
        "": "narrower weights (8 or 4 bits)",
    },
    "speculation": {
        "headrace": '--speculative-config \'{{"method": "ngram"}}\'',
        "vllm": '--speculative-config \'{{"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 4}}\'',
        "tgi": "--speculate 3",
        "llama.cpp": "--model-draft SMALLER.gguf",
        "": "speculative decoding",
    },
    "more": {
        "headrace": "a second server behind a balancer, or a machine with more cores",
        "vllm": "--tensor-parallel-size 2, or a second replica",
        "tgi": "--num-shard 2, or a second replica",
        "llama.cpp": "a second server, or more cores (--threads)",
        "": "a second replica, or a faster device",
    },
    "warm": {
        "": "a request after every start, before traffic comes; keep one replica running",
    },
    "near": {
        "": "a client, gateway or replica in the server's region; connections that stay open",
    },
    "client": {
        "": "the load from several processes or machines",
    },
}


class Switch(msgspec.Struct, kw_only=True):
    """What to change, in the engine's words. ``serve``: options of our own server, if it is that."""

    text: str
    serve: dict[str, str] = {}


def switch(what: str, engine: str | None, **numbers: object) -> Switch:
    """Words of ``_WORDS`` for ``engine``; ``numbers`` fill the gaps."""
    words = _WORDS[what]
    text = words.get(engine or "", words[""]).format(**numbers)
    serve = {}
    if engine == "headrace" and text.startswith("--"):
        option, _, value = text.partition(" ")
        serve[option] = shlex.split(value)[0] if value else ""
    return Switch(text=text, serve=serve)


def proof(
    m: Measurements, changed: Switch, users: int, prompt: float | None, output: float | None
) -> list[str]:
    """A ``headrace bench`` before, one after, and the comparison; a comment says what to do in between."""
    load = (
        f"--concurrency {users} --prompt-tokens {round(prompt or 128)} --output-tokens {round(output or 64)} "
        "--seed 1"
    )
    bench = f"headrace bench {shlex.quote(m.target)} {load}"
    last = "headrace bench --compare before.json after.json"
    if m.is_model and changed.serve:
        before = f" --serve {shlex.quote(m.serve)}" if m.serve else ""
        after = f" --serve {shlex.quote(_with_options(m.serve, changed.serve))}"
        return [f"{bench}{before} --output before.json", f"{bench}{after} --output after.json", last]
    return [
        f"{bench} --output before.json",
        f"# now change: {changed.text}",
        f"{bench} --output after.json",
        last,
    ]


def _with_options(serve: str, changed: dict[str, str]) -> str:
    """``serve`` with these options in place of what it had."""
    words = shlex.split(serve)
    kept = []
    while words:
        word = words.pop(0)
        if word.partition("=")[0] not in changed:
            kept.append(word)
        elif "=" not in word and changed[word] and words:
            words.pop(0)
    return shlex.join([*kept, *(part for pair in changed.items() for part in pair if part)])
