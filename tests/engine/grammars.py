"""Grammars over the 64 tokens of the small engines: token 7 ends, the others are a few bytes of text."""

from __future__ import annotations

from typing import Any

from headrace.engine.grammar import GrammarCompiler, Vocabulary
from headrace.engine.request import StructuredOutputs
from tests.engine.small_engines import EOS, VOCAB

_TEXTS = [
    *("0", "1", "2", "3", "4", "5", "6", "", "7", "8", "9"),
    *('"', "{", "}", "[", "]", ":", ",", " ", "\n", "-", ".", "\\", "/", "_"),
    *"abcdefghijklmnopqrstuvwxyz",
    *('{"', '":', ' "', '", ', "12", "345", "ab", "the", "true", "null"),
]
TOKENS = [text.encode() for text in _TEXTS] + [b""] * (VOCAB - len(_TEXTS))
SPECIAL = 63  # a control token whose text would do almost anywhere
TOKENS[SPECIAL] = b"a"


def vocabulary() -> Vocabulary:
    return Vocabulary(tokens=TOKENS, special_ids=[EOS, SPECIAL], eos_token_ids=[EOS])


def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary())


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENS[token] for token in token_ids).decode()


def wanted(**kind: Any) -> StructuredOutputs:
    return StructuredOutputs(**kind)
