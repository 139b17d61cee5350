"""A small model with a tokenizer that every format can tell, and its linears rounded in every scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.lab.compress.quantized import QuantizedLinear, Scheme
from headrace.model.checkpoint import Checkpoint, as_float32
from tests.frontend.byte_model import TEMPLATE
from tests.model.quantised_folders import rounded
from tests.model.tiny import CASES

PROMPT = list(range(5, 45))


def make_source(folder: Path, case: str = "llama3") -> Path:
    """A float32 folder with a byte-level tokenizer of 261 tokens, two of them merged."""
    CASES[case](folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "th", "the"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<turn>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 258, "eos_token_id": [259, 260]})
    )
    return folder


def linears_of(
    checkpoint: Checkpoint, scheme: Scheme, *, scale_type: Any = np.float16
) -> dict[str, QuantizedLinear | np.ndarray[Any, Any]]:
    """All tensors of a checkpoint, the layers' matrices rounded."""
    tensors: dict[str, QuantizedLinear | np.ndarray[Any, Any]] = {}
    for name in checkpoint.names():
        dense = as_float32(checkpoint.tensor(name))
        matrix = dense.ndim == 2 and name.startswith("layers.")
        tensors[name] = round_linear(dense, scheme, scale_type) if matrix else dense
    return tensors


def round_linear(
    weight: np.ndarray[Any, Any], scheme: Scheme, scale_type: Any = np.float16
) -> QuantizedLinear:
    if scheme.kind == "float8":
        scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
        narrow = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedLinear(narrow.view(np.uint8), scale, scheme)
    w = rounded(
        weight,
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        act_order=scheme.act_order == "group",
        scale_type=scale_type,
    )
    zero = None if scheme.symmetric else w.zero
    return QuantizedLinear(w.codes, w.scale, scheme, zero, w.groups if scheme.act_order == "group" else None)


INT4 = Scheme(4, 32)
INT4_ZEROS = Scheme(4, 32, symmetric=False)
INT4_ORDER = Scheme(4, 32, act_order="group")
INT8 = Scheme(8, 32)
INT8_ZEROS = Scheme(8, 32, symmetric=False)
W8A8 = Scheme(8, None, input_activations="dynamic-token")
FP8 = Scheme(8, None, kind="float8", input_activations="dynamic-token")

WRITTEN: dict[str, tuple[str, Scheme]] = {
    "compressed-tensors int4": ("compressed-tensors", INT4),
    "compressed-tensors int4 zero points": ("compressed-tensors", INT4_ZEROS),
    "compressed-tensors int4 act-order": ("compressed-tensors", INT4_ORDER),
    "compressed-tensors int4 rows": ("compressed-tensors", Scheme(4, None)),
    "compressed-tensors int4 groups of 16": ("compressed-tensors", Scheme(4, 16)),
    "compressed-tensors int8": ("compressed-tensors", INT8),
    "compressed-tensors int8 zero points": ("compressed-tensors", INT8_ZEROS),
    "compressed-tensors w8a8": ("compressed-tensors", W8A8),
    "compressed-tensors fp8": ("compressed-tensors", FP8),
    "gptq": ("gptq", INT4),
    "gptq 8 bits": ("gptq", INT8),
    "gptq act-order": ("gptq", INT4_ORDER),
    "gptq zero points": ("gptq", INT4_ZEROS),
    "gptq-v2": ("gptq-v2", INT4),
    "awq": ("awq", INT4_ZEROS),
    "awq symmetric": ("awq", INT4),
    "gguf q4_0": ("gguf", INT4),
    "gguf q8_0": ("gguf", INT8),
    "gguf q8_0 rows": ("gguf", Scheme(8, None)),
    "gguf q4_1": ("gguf", INT4_ZEROS),
}
"""Format and scheme; all but Q4_1, whose minimum is float16, hold a weight's values to the bit."""
