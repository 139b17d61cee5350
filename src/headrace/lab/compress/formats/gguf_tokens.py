"""A tokenizer as GGUF metadata: the inverse of ``frontend/gguf_tokenizer.py``.

A GGUF file's own keys are copied. A Transformers folder's are made from tokenizer.json: byte-level BPE whose
pre-tokenizer GGUF has a name for, or SentencePiece BPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, ModelFormatError
from headrace.frontend.gguf_tokenizer import pre_tokenizer_name
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.model.weights.gguf import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NEVER_MERGED = -1e9  # score of a piece that no merge makes; real ones are small negative numbers


def tokenizer_metadata(source: Path, vocab_size: int) -> dict[str, Any]:
    """``tokenizer.*`` keys for a vocabulary of ``vocab_size`` rows.

    Raises ConfigError for a kind of tokenizer that GGUF does not have, ModelFormatError for a broken one.
    """
    if source.is_file() and source.suffix != ".safetensors":
        metadata = GGUFFile(source).metadata
        return {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
    folder = source if source.is_dir() else source.parent
    tokenizer = load_tokenizer(source)  # refuses what is no tokenizer
    try:
        described = json.loads((folder / "tokenizer.json").read_bytes())
        keys = _vocabulary(described, vocab_size)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFormatError(
            f"{folder / 'tokenizer.json'} is not as tokenizers writes it: {error}."
        ) from None
    return keys | _special(tokenizer)


def _vocabulary(described: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    model = described["model"]
    if model["type"] != "BPE":
        raise ConfigError(f"A tokenizer of the kind {model['type']} cannot be written as GGUF.")
    byte_level = "ByteLevel" in json.dumps(described.get("pre_tokenizer"))
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = np.full(vocab_size, _UNUSED, np.int32)
    for token, index in model["vocab"].items():
        if index >= vocab_size:
            raise ConfigError(f"The tokenizer has id {index}, but the model only {vocab_size} rows.")
        tokens[index], kinds[index] = token, _kind(token, model, byte_level=byte_level)
    for added in described.get("added_tokens", []):
        if added["id"] >= vocab_size:
            raise ConfigError(f"The tokenizer has id {added['id']}, but the model only {vocab_size} rows.")
        if kinds[added["id"]] != _UNKNOWN:
            kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
        tokens[added["id"]] = added["content"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if byte_level:
        name = pre_tokenizer_name(described)
        if name is None:
            raise ConfigError(
                "The tokenizer cuts text in a way that GGUF has no name for that headrace knows: write a "
                "Transformers folder, or convert with llama.cpp's own script."
            )
        pairs = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}
        return keys | pairs
    scores = np.full(vocab_size, _NEVER_MERGED, np.float32)
    rank_of: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        rank_of.setdefault(merge.replace(" ", "", 1), rank)
    for token, rank in rank_of.items():
        if (index := model["vocab"].get(token)) is not None:
            scores[index] = -rank
    prepends = "Prepend" in json.dumps(described.get("normalizer"))
    return keys | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prepends,
    }


def _kind(token: str, model: dict[str, Any], *, byte_level: bool) -> int:
    if not byte_level and token == model.get("unk_token"):
        return _UNKNOWN
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return _BYTE if is_byte and not byte_level and model.get("byte_fallback") else _NORMAL


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    ids = tokenizer.encode("a")
    bos = tokenizer.bos_token_id
    if bos is not None:
        keys["tokenizer.ggml.bos_token_id"] = bos
        keys["tokenizer.ggml.add_bos_token"] = ids[:1] == [bos]
    if tokenizer.eos_token_ids:
        keys["tokenizer.ggml.eos_token_id"] = tokenizer.eos_token_ids[0]
        keys["tokenizer.ggml.add_eos_token"] = ids[-1:] == [tokenizer.eos_token_ids[0]]
        if len(tokenizer.eos_token_ids) > 1:  # of the several that end a turn GGUF has room for two
            keys["tokenizer.ggml.eot_token_id"] = tokenizer.eos_token_ids[1]
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys
