"""What `headrace eval` promises, checked with a real model instead of the small ones of the tests.

    python benchmarks/eval_bars.py [--model smollm2-135m] [--tokens 2048]

Dequantises the model to a float checkpoint and checks with it that

- perplexity, by both conventions, is that of transformers in float32 to four digits,
- KL and the same-top-1 rate are those of a direct computation over whole rows,
- ``--gate default`` passes the checkpoint narrowed to 8 bits, and refuses it with one matrix scaled.

Exits with 1 if any does not hold. Needs torch, transformers and gguf.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.evaluate.divergence import Convention, windows_of
from headrace.lab.evaluate.texts import load_text, tokenise
from headrace.model import store

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def dequantised(path: Path) -> Any:
    """A Llama of a GGUF file in float32, read by the package gguf, whose q and k rows are interleaved."""
    reader = GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        weights = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, name, _ = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):
            count = heads if name == "attn_q" else kv_heads
            rows, columns = weights.shape
            split = weights.reshape(count, rows // count // 2, 2, columns)
            weights = split.transpose(1, 2).reshape(rows, columns)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{_NAMES[name]}.weight"] = weights
    config = LlamaConfig(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings="lm_head.weight" not in state,
    )
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def rows_of(model: Any, token_ids: list[int], first: int) -> np.ndarray:
    """Log-softmax rows in float64 of the tokens from ``first`` on, of float32 logits."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, first - 1 : -1].double()
    return torch.log_softmax(logits, -1).numpy()


def evaluate(folder: Path, tokens: int, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and the result of the suite perplexity."""
    output = folder / "eval.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "headrace.cli", "eval", *more, "-s", "perplexity"]
    done = subprocess.run([*command, "--tokens", str(tokens), "-o", str(output)], check=False)
    result: dict[str, Any] = json.loads(output.read_text())["suites"]["perplexity"]["result"]
    return done.returncode, result


def check(name: str, found: float, expected: float, relative: float) -> bool:
    """Print both and whether they agree."""
    good = math.isclose(found, expected, rel_tol=relative)
    print(f"{name}: eval {found:.6f}, directly {expected:.6f}: {'agrees' if good else 'DIFFERS'}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a Llama in GGUF")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    path = store.resolve(options.model)
    model = dequantised(path)
    tokenizer = load_tokenizer(path)
    token_ids = tokenise(load_text(["shakespeare"]), tokenizer, options.tokens)
    good = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "good")
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder / "good")
        conventions: list[tuple[Convention, int]] = [("windows", 1024), ("llama.cpp", 512)]
        for convention, context in conventions:
            losses = []
            for window in windows_of(token_ids, convention, context):
                rows = rows_of(model, window.token_ids, window.first)
                losses.append(-rows[np.arange(len(rows)), window.token_ids[window.first :]])
            expected = math.exp(np.concatenate(losses).mean())
            arguments = [options.model, "--backend", "torch", "--convention", convention]
            _, result = evaluate(folder, options.tokens, *arguments)
            value = result["perplexity"]["value"]
            good.append(check(f"perplexity ({convention})", value, expected, 5e-5))

        status, result = evaluate(
            folder,
            options.tokens,
            *(str(folder / "good"), "--against", str(folder / "good"), "--quantization", "int8"),
            *("--gate", "default"),
        )
        good.append(status == 0)

        state = model.state_dict()
        middle = model.config.num_hidden_layers // 2
        damaged = {
            key: value * 2 if f"layers.{middle}.mlp.down_proj" in key else value
            for key, value in state.items()
        }
        (folder / "damaged").mkdir()
        for file in (folder / "good").iterdir():
            if file.suffix == ".json" or file.name.startswith("tokenizer"):
                (folder / "damaged" / file.name).write_bytes(file.read_bytes())
        model.save_pretrained(folder / "damaged", state_dict=damaged)
        status, result = evaluate(
            folder,
            options.tokens,
            *(str(folder / "damaged"), "--against", str(folder / "good"), "--backend", "torch"),
            *("--gate", "default"),
        )
        good.append(status == 1)
        other = AutoModelForCausalLM.from_pretrained(folder / "damaged", dtype=torch.float32).eval()
        kl, same = [], []
        for window in windows_of(token_ids, "windows", 1024):
            theirs = rows_of(model, window.token_ids, window.first)
            ours = rows_of(other, window.token_ids, window.first)
            kl.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
            same.append(theirs.argmax(axis=1) == ours.argmax(axis=1))
        divergence = result["divergence"]
        good.append(check("KL mean", divergence["kl"]["value"], float(np.concatenate(kl).mean()), 1e-4))
        same_top1 = float(np.concatenate(same).mean())
        good.append(check("same top-1", divergence["same_top1"]["value"], same_top1, 1e-3))
    print("all hold" if all(good) else "NOT ALL HOLD")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
