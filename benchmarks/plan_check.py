"""How far ``headrace plan --here`` is off: ``python benchmarks/plan_check.py``, on a quiet machine.

Predicts and measures decoding and prefill of SmolLM2 135M as shipped, and of the 1B shape (Llama 3.2 1B's
sizes, random weights, written as safetensors into a temporary folder) quantised to int4 while loading. The
factors are the same for both. Prints the four errors; exit status 1 if one is beyond 25%.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from headrace.lab.plan.hardware import read_hardware
from headrace.lab.plan.here import check_here
from headrace.lab.plan.report import errors
from headrace.lab.plan.serving import Workload
from headrace.lab.plan.source import known_shapes
from headrace.model.store import resolve
from headrace.model.weights.hf_config import architecture_from_hf
from headrace.model.weights.tensor_shapes import expected_shapes

BAR = 0.25
SHAPE = "llama-3.2-1b"
_PARTS = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}


def hf_name(name: str) -> str:
    """Of a llama checkpoint, for a canonical name."""
    if not name.startswith("layers."):
        return {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}[name]
    _, layer, part, *rest = name.split(".")
    inner = f"{rest[0]}_proj.weight" if len(rest) == 2 else "weight"
    return f"model.layers.{layer}.{_PARTS[part]}.{inner}"


def write_random(folder: Path, shape: str) -> None:
    """A checkpoint of the shape with normal weights that keep activations of order one, and a tokenizer."""
    config = {key: value for key, value in known_shapes()[shape].items() if key != "source"}
    config |= {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    pool = np.random.default_rng(0).standard_normal(2**24, np.float32)  # drawn once, used from many places
    tensors = {}
    for index, (name, dims) in enumerate(expected_shapes(architecture_from_hf(config)).items()):
        if len(dims) == 1:
            values = np.ones(dims, np.float32)
        else:
            flat = np.resize(np.roll(pool, 7919 * index), dims[0] * dims[1])
            values = flat.reshape(dims) * np.float32(dims[1] ** -0.5)
        tensors[hf_name(name)] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rest = [f"<{number}>" for number in range(len(letters), int(config["vocab_size"]))]
    vocabulary = {token: number for number, token in enumerate([*letters, *rest])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def main() -> None:
    """Print predictions, measurements and errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--quantization", choices=("int4", "int8"), default="int4", help="of the 1B shape")
    parser.add_argument("--only", choices=("smollm2-135m", SHAPE))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases_found: list[dict[str, object]] = []
    resolve("smollm2-135m")  # before the cache is another
    with tempfile.TemporaryDirectory() as scratch:
        cases: list[tuple[str, str, Literal["int4", "int8"] | None, Workload]] = []
        if args.only != SHAPE:
            cases.append(("smollm2-135m", "smollm2-135m", None, Workload(2048, 128, 1)))
        if args.only != "smollm2-135m":
            folder = Path(scratch, SHAPE)
            folder.mkdir()
            write_random(folder, SHAPE)
            cases.append(
                (f"{SHAPE} {args.quantization}", str(folder), args.quantization, Workload(1024, 32, 1))
            )
        for title, model, quantization, work in cases:
            if model != "smollm2-135m":
                os.environ["HEADRACE_CACHE"] = scratch  # packed random weights are nobody's to keep
            factors = read_hardware().engine
            found, measured = check_here(
                model, work, factors, quantization=quantization, threads=args.threads, runs=args.runs
            )
            off = errors(found, measured)
            print(f"{title}, {found.threads} threads, {found.limits.isa}, medians of {measured.runs} rounds")
            print(
                f"  decode  {measured.decode_tokens_per_s:8.1f} tokens/s, predicted "
                f"{found.decode_tokens_per_s:8.1f} ({off['decode']:+.0%})"
            )
            print(
                f"  prefill {measured.prefill_tokens_per_s:8.1f} tokens/s, predicted "
                f"{found.prefill_tokens_per_s:8.1f} ({off['prefill']:+.0%})"
            )
            cases_found.append({"case": title, "error": off})
    if args.json:
        args.json.write_text(json.dumps(cases_found, indent=1))
    worst = max(abs(value) for case in cases_found for value in case["error"].values())  # type: ignore[attr-defined]
    print(f"largest error: {worst:.0%} (bar: {BAR:.0%})")
    sys.exit(worst > BAR)


if __name__ == "__main__":
    main()
