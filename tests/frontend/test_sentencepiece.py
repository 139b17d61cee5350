"""SentencePiece tokenizers rebuilt from GGUF vocabularies, against the sentencepiece library itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.gguf_tokenizer import convert, spm_merges
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.model.weights.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def sentencepiece_model(
    pieces: Sequence[tuple[str, float, int]], unknown: int, *, dummy_prefix: bool
) -> sentencepiece.SentencePieceProcessor:
    """A processor from a vocabulary: sentencepiece's ModelProto, written field by field."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
        return bytes(out)

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    def message(field: int, content: bytes) -> bytes:
        return varint(field << 3 | 2) + varint(len(content)) + content

    proto = bytearray()
    for index, (text, score, kind) in enumerate(pieces):
        kind = UNKNOWN if index == unknown else kind
        proto += message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
    bpe, byte_fallback, no_token = number(3, 2), number(35, 1), (1 << 64) - 1
    ids = number(40, unknown) + b"".join(number(field, no_token) for field in (41, 42, 43))
    proto += message(2, bpe + number(4, len(pieces)) + byte_fallback + ids)
    proto += message(3, message(1, b"identity") + number(3, dummy_prefix) + number(4, 0) + number(5, 1))
    return sentencepiece.SentencePieceProcessor(model_proto=bytes(proto))


@pytest.fixture(scope="module")
def gemma(gemma3_path: Path) -> Tokenizer:
    return load_tokenizer(gemma3_path)


@pytest.fixture(scope="module")
def vocabulary(gemma3_path: Path) -> list[tuple[str, float, int]]:
    metadata = GGUFFile(gemma3_path).metadata
    keys = ("tokens", "scores", "token_type")
    columns = [list(metadata[f"tokenizer.ggml.{key}"]) for key in keys]
    return list(zip(*columns, strict=True))


def test_gemma_encodes_as_sentencepiece_does(
    gemma: Tokenizer, vocabulary: list[tuple[str, float, int]]
) -> None:
    spelled = [(t.replace(" ", "▁") if k == USER_DEFINED else t, s, int(k)) for t, s, k in vocabulary]
    reference = sentencepiece_model(spelled, 3, dummy_prefix=False)
    controls = [text for text, _, kind in vocabulary if kind == CONTROL]
    normal = [text for text, _, kind in vocabulary if kind == NORMAL]
    # A text's own U+2581 next to a space is read as a space by sentencepiece, as itself here.
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
    pieces = st.sampled_from(normal).map(lambda piece: piece.replace("▁", " "))
    words = st.sampled_from(
        ["Hello", " world", "  ", "\n\n", "\t\t", "</table>", "日本", "🙂", " 123", "don't"]
    )

    @settings(max_examples=300)
    @given(st.lists(st.text(characters, max_size=10) | pieces | words, max_size=12).map("".join))
    def check(text: str) -> None:
        if not any(control in text for control in controls):
            assert gemma.encode(text, add_special_tokens=False) == reference.encode(text)

    check()


def test_gemma_adds_bos_and_knows_its_ends(gemma: Tokenizer) -> None:
    assert gemma.encode("Hello")[0] == gemma.bos_token_id == 2
    assert gemma.eos_token_ids == (1, 106)
    assert gemma.chat_template is None
    assert gemma.vocab_size == 262144
    text = "Hello,  world\n\n\t日本 🙂 \x07"
    assert gemma.decode(gemma.encode(text)) == text


letters = st.text("ab▁", min_size=1, max_size=6)


@settings(max_examples=150)
@given(st.dictionaries(letters, st.integers(-50, 50), max_size=25), st.data())
def test_any_scores_give_sentencepieces_merges(scores: dict[str, int], data: st.DataObject) -> None:
    """Also where a whole outranks its parts and where a piece can't arise at all: no training makes those."""
    ranked = [(piece, float(score) - index / 64) for index, (piece, score) in enumerate(scores.items())]
    pieces = [("<unk>", 0.0, UNKNOWN), *((f"<0x{b:02X}>", 0.0, BYTE) for b in range(256))]
    pieces += [(letter, -100.0 - i, NORMAL) for i, letter in enumerate("ab▁") if letter not in scores]
    pieces += [(piece, score, NORMAL) for piece, score in ranked]
    reference = sentencepiece_model(pieces, 0, dummy_prefix=True)
    ours = build(pieces)
    for text in data.draw(st.lists(st.text("ab ", min_size=1, max_size=14), min_size=1, max_size=8)):
        assert ours(text) == reference.encode(text), text


def build(pieces: Sequence[tuple[str, float, int]]) -> Callable[[str], list[int]]:
    import tokenizers

    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": [text for text, _, _ in pieces],
        "scores": np.array([score for _, score, _ in pieces], np.float32),
        "token_type": np.array([kind for _, _, kind in pieces], np.int32),
        "unknown_token_id": 0,
    }
    converted = convert({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(converted.tokenizer)))
    return tokenizer.encode


def test_a_llama2_vocabulary_keeps_its_prefix_space() -> None:
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
    pieces += [("▁a", -1.0, NORMAL), ("▁", -2.0, NORMAL), ("a", -3.0, NORMAL)]
    first = len(pieces) - 3
    encode = build(pieces)
    assert encode("a") == [first]
    assert encode(" a") == [first + 1, first]
    assert encode("é") == [first + 1, 3 + 0xC3, 3 + 0xA9]
    assert encode("a</s>a") == [first, 2, first], "each text between control tokens has its own prefix"


def test_one_rule_per_piece_that_can_arise() -> None:
    pieces = [("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -1.0), ("bc", -2.0), ("abc", -3.0), ("xy", -4.0)]
    assert spm_merges(pieces) == ["a b", "b c", "ab c"]
