"""Byte-level BPE against the published algorithm, transformers, and the published SmolLM2."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.gguf_tokenizer import convert
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.model.weights.gguf import GGUFFile

TRICKY = [
    "Hello, world!",
    " leading and trailing ",
    "two  spaces\n\n\nlines\t\ttabs \r\n end",
    "don't I'LL they're we've",
    "numbers 1234567 ½ ³ ٣٤ 3.14159e-10",
    "naïve café ﬁ Å e\u0301 ñ",
    "日本語のテキスト 한국어 русский עברית",
    "emoji 🙂👩‍👩‍👧 🏳️‍🌈",
    "def f(x):\n    return {'a': [x ** 2]}  # comment\n",
    "\x00\x01 control \u200b zero width \ufeff",
    "a" * 300,
    "",
]
# SmolLM2 lacks tokens for bytes of characters that nobody has assigned; what is lost is merged differently.
letters = st.characters(exclude_categories=("Cs", "Cn", "Co"))
texts = st.text(letters, max_size=60) | st.lists(st.sampled_from(TRICKY), max_size=3).map(" ".join)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = {
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


class ByteLevelBPE:
    """The published algorithm, written plainly: split into words, merge the best pair until none is left."""

    def __init__(self, metadata: dict[str, Any], name: str) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.patterns = WORDS[name]
        self.whole_words = name == "llama-bpe"

    def encode(self, text: str) -> list[int]:
        words = [text] if text else []
        for pattern in self.patterns:
            words = [piece for word in words for piece in self.split(pattern, word)]
        return [token for word in words for token in self.merge(word)]

    @staticmethod
    def split(pattern: str, text: str) -> Iterator[str]:
        at = 0
        for match in regex.finditer(pattern, text):
            if match.start() > at:
                yield text[at : match.start()]
            yield match[0]
            at = match.end()
        if at < len(text):
            yield text[at:]

    def merge(self, word: str) -> list[int]:
        symbols = [self.letters[b] for b in word.encode()]
        if self.whole_words and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        # SmolLM2 has no token for bytes that begin characters of unassigned planes: lost, as upstream.
        return [self.ids[symbol] for symbol in symbols if symbol in self.ids]


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="module")
def with_pre(
    metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Tokenizer]:
    """SmolLM2's vocabulary under another pre-tokenizer, as a folder."""
    made: dict[str, Tokenizer] = {}

    def make(name: str) -> Tokenizer:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            converted = convert(
                metadata | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
            )
            (folder / "tokenizer.json").write_text(json.dumps(converted.tokenizer))
            made[name] = load_tokenizer(folder)
        return made[name]

    return make


@pytest.mark.parametrize("name", WORDS)
def test_byte_level_bpe_is_the_published_algorithm(
    name: str, metadata: dict[str, Any], with_pre: Callable[[str], Tokenizer]
) -> None:
    ours, reference = with_pre(name), ByteLevelBPE(metadata, name)

    @settings(max_examples=60)
    @given(texts)
    def check(text: str) -> None:
        if name == "qwen2":
            assert ours.encode(text) == ours.encode(unicodedata.normalize("NFC", text))
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == reference.encode(text)

    check()


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_byte_level_bpe_is_that_of_transformers(
    name: str, metadata: dict[str, Any], with_pre: Callable[[str], Tokenizer]
) -> None:
    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    keys = {"tokens": "tokens", "merges": "merges", "token_type": "token_type"}
    described = {theirs: list(metadata[f"tokenizer.ggml.{ours}"]) for theirs, ours in keys.items()}
    described |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": name}
    theirs, _ = gguf.convert_gguf_tokenizer("llama", described)
    for text in TRICKY:
        if name != "qwen2" or "\u0301" not in text:  # they leave out Qwen2's normalisation to NFC
            assert with_pre(name).encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_smollm2_chat_ids_are_those_of_the_published_tokenizer(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
    ids += [19712, 8182, 2, 198, 1, 4093, 198]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
    )
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.chat_template and "im_start" in tokenizer.chat_template


def test_token_bytes(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    for text in TRICKY:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_long_texts_take_the_same_path(smollm2_path: Path) -> None:
    """Long texts go through another call, which lets other threads run."""
    tokenizer = load_tokenizer(smollm2_path)
    text = "\n".join(TRICKY) * 20
    assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids
