"""A tokenizer written as GGUF metadata, turned into the files of a Hugging Face folder.

Everything after this conversion reads one format. Sources: the ``tokenizer.ggml.*`` keys of the GGUF
specification, llama.cpp for their defaults, SentencePiece for the order of merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.errors import ModelFormatError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as a lower one eighth block

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BYTE_LEVEL: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "gpt-2": (None, [_byte_level(use_regex=True)], False),
    "smollm": (
        None,
        [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
        False,
    ),
    "llama-bpe": (None, [_split(_LLAMA3_WORDS), _byte_level(use_regex=False)], True),
    "qwen2": ({"type": "NFC"}, [_split(_QWEN2_WORDS), _byte_level(use_regex=False)], False),
}
"""By GGUF's name: normalizer, pre-tokenizers, and whether words that are tokens stay whole."""
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}

# Many files do not list these as ends of a turn although their chat templates write them.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|endoftext|>")
)


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """The contents of tokenizer.json, tokenizer_config.json and generation_config.json."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    generation: dict[str, Any]


def convert(metadata: Mapping[str, Any]) -> ConvertedTokenizer:
    """Convert ``tokenizer.ggml.*`` and ``tokenizer.chat_template``.

    Raises ModelFormatError if a key is missing, has the wrong type or length, or names a tokenizer or
    pre-tokenizer that is not supported.
    """
    tokens = _strings(metadata, "tokens")
    kinds = _numbers(metadata, "token_type", len(tokens), default=_NORMAL)
    kind_name = _text(metadata, "model")
    bos, eos = (_token_id(metadata, key, len(tokens)) for key in ("bos_token_id", "eos_token_id"))
    if kind_name == "gpt2":
        parts = _byte_level_parts(metadata, tokens)
        default_bos = parts["model"]["ignore_merges"]  # llama.cpp adds BOS for Llama 3 unless told otherwise
    elif kind_name == "llama":
        tokens = [
            t.replace(_SPACE, " ") if k == _USER_DEFINED else t for t, k in zip(tokens, kinds, strict=True)
        ]
        parts = _sentencepiece_parts(metadata, tokens, kinds)
        default_bos = True
    else:
        raise ModelFormatError(
            f"The GGUF file's tokenizer is of the kind {kind_name!r}; supported are 'gpt2' (byte-level BPE) "
            "and 'llama' (SentencePiece)."
        )
    add_bos = bos is not None and _flag(metadata, "add_bos_token", default_bos)
    add_eos = eos is not None and _flag(metadata, "add_eos_token", False)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError("tokenizer.chat_template in the GGUF file is not a string.")
    return ConvertedTokenizer(
        tokenizer={
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(tokens, kinds),
            **parts,
            "post_processor": _post_processor(
                (tokens[bos], bos) if add_bos and bos is not None else None,
                (tokens[eos], eos) if add_eos and eos is not None else None,
            ),
        },
        config={
            "bos_token": None if bos is None else tokens[bos],
            "eos_token": None if eos is None else tokens[eos],
            "chat_template": template,
        },
        generation={"bos_token_id": bos, "eos_token_id": _end_ids(metadata, tokens, kinds, eos)},
    )


def spm_merges(pieces: Iterable[tuple[str, float]]) -> list[str]:
    """The merge rules ``"left right"``, best first, under which BPE does what SentencePiece does with scores.

    SentencePiece joins, of all neighbours whose concatenation is a piece, those of the highest score, the
    leftmost among equals. The joins inside a substring that ends up as one piece are therefore those that
    happen when the substring stands alone: a join across its edge would have split it. So each piece needs
    one rule, the last join of the piece standing alone, and pieces that never arise need none. With all
    possible splits (transformers' way) a vocabulary of 262,144 has twice as many rules, and costs twice
    the time and memory to load.
    """
    ordered = [piece for piece, _ in sorted(pieces, key=lambda entry: -entry[1])]
    rank = {piece: index for index, piece in enumerate(ordered)}
    never = len(ordered)
    merges = []
    for piece in ordered:
        symbols = list(piece)
        if len(symbols) < 2:
            continue
        ranks = [rank.get(a + b, never) for a, b in pairwise(symbols)]
        while len(symbols) > 2:
            best = min(ranks)
            if best == never:
                break
            at = ranks.index(best)
            symbols[at] += symbols.pop(at + 1)
            ranks.pop(at)
            if at > 0:
                ranks[at - 1] = rank.get(symbols[at - 1] + symbols[at], never)
            if at < len(ranks):
                ranks[at] = rank.get(symbols[at] + symbols[at + 1], never)
        else:
            left, right = symbols
            if left in rank and right in rank:
                merges.append(f"{left} {right}")
    return merges


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """GGUF's name of how a byte-level ``tokenizer.json`` cuts text into words; None if it has none here."""
    wanted = _steps(tokenizer.get("pre_tokenizer") or {})
    for name, (normalizer, steps, _) in _BYTE_LEVEL.items():
        if tokenizer.get("normalizer") == normalizer and wanted == [_essence(step) for step in steps]:
            return name
    return None


def _steps(pre_tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return [_essence(step) for step in steps]


def _essence(step: Mapping[str, Any]) -> dict[str, Any]:
    """A pre-tokenizer without what changes offsets only, and defaults that older files leave out."""
    defaults = {"use_regex": True} if step.get("type") == "ByteLevel" else {}
    return {**defaults, **{key: value for key, value in step.items() if key != "trim_offsets"}}


def _byte_level_parts(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    merges = _strings(metadata, "merges")
    for merge in merges:
        if merge.count(" ") != 1:
            raise ModelFormatError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair of tokens.")
    name = _text(metadata, "pre")
    family = _ALIASES.get(name or "", name)
    if family not in _BYTE_LEVEL:
        raise ModelFormatError(
            f"The GGUF file's pre-tokenizer is {name!r}; supported are {', '.join(_BYTE_LEVEL)}. "
            "A folder with the model's own tokenizer.json works with any."
        )
    normalizer, steps, whole_words = _BYTE_LEVEL[family]
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(tokens, merges, ignore_merges=whole_words),
    }


def _sentencepiece_parts(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    scores = _numbers(metadata, "scores", len(tokens))
    unknown = _token_id(metadata, "unknown_token_id", len(tokens))
    if unknown is None and _UNKNOWN in kinds:
        unknown = kinds.index(_UNKNOWN)
    pieces = [(t, s) for t, s, k in zip(tokens, scores, kinds, strict=True) if k == _NORMAL]
    if any(" " in piece for piece, _ in pieces):
        raise ModelFormatError(f"A SentencePiece token holds a plain space; it should be written {_SPACE!r}.")
    has_bytes = {f"<0x{byte:02X}>" for byte in range(256)} <= set(tokens)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = escape
    if _flag(metadata, "add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, escape]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            spm_merges(pieces),
            unk_token=None if unknown is None else tokens[unknown],
            byte_fallback=has_bytes,
        ),
    }


def _bpe(
    tokens: list[str],
    merges: list[str],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)  # a token written twice is reached by its first id
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text as they stand, before anything else looks at it."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any] | None:
    def wrapped(*names: str) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for type_id, name in enumerate(names):
            if bos is not None:
                out.append({"SpecialToken": {"id": bos[0], "type_id": type_id}})
            out.append({"Sequence": {"id": name, "type_id": type_id}})
            if eos is not None:
                out.append({"SpecialToken": {"id": eos[0], "type_id": type_id}})
        return out

    added = [token for token in (bos, eos) if token is not None]
    if not added:
        return None
    return {
        "type": "TemplateProcessing",
        "single": wrapped("A"),
        "pair": wrapped("A", "B"),
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in added},
    }


def _end_ids(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], eos: int | None) -> list[int]:
    named = (_token_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))
    ids = {index for index in (eos, *named) if index is not None}
    ids.update(i for i, token in enumerate(tokens) if token in _END_OF_TURN and kinds[i] == _CONTROL)
    return sorted(ids)


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not isinstance(value, str):
        raise ModelFormatError(f"tokenizer.ggml.{key} in the GGUF file is not a string.")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ModelFormatError(
            f"The GGUF file has no usable tokenizer.ggml.{key}: a list of strings is needed."
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: int | None = None) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None and default is not None:
        return [default] * count
    array = np.asarray(value if value is not None else [])
    if array.ndim != 1 or array.dtype.kind not in "iuf" or array.size != count:
        raise ModelFormatError(
            f"The GGUF file has no usable tokenizer.ggml.{key}: {count} numbers are needed, one per token."
        )
    if not np.isfinite(array).all():
        raise ModelFormatError(f"tokenizer.ggml.{key} in the GGUF file holds NaN or infinity.")
    return list(array.tolist())


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < count:
        raise ModelFormatError(f"tokenizer.ggml.{key} is {value!r}; the vocabulary has ids 0 to {count - 1}.")
    return int(value)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, (bool, np.bool_)):
        raise ModelFormatError(f"tokenizer.ggml.{key} is {value!r}; it should be true or false.")
    return bool(value)
