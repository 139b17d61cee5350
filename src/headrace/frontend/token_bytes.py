"""From a token's spelling in the vocabulary to the bytes it stands for.

``tokenizers`` decodes whole lists of ids; streaming and log-probabilities need each token's bytes. Both
families of generative tokenizers are, underneath, lists of byte strings: this is where that list comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a vocabulary spells bytes. ``strip_leading_space``: a text's first space is the tokenizer's own."""

    to_bytes: Callable[[str], bytes]
    strip_leading_space: bool = False


def spelling_of(decoder: Mapping[str, Any] | None) -> TokenSpelling | None:
    """Read the ``decoder`` of a tokenizer.json; None if it is not one of the two generative families."""
    steps = _flatten(decoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return TokenSpelling(byte_level_bytes)
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    byte_fallback = "ByteFallback" in kinds
    replacements: list[tuple[str, str]] = []
    strip = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if pattern is None:
                return None
            replacements.append((pattern, step["content"]))
        elif kind == "Metaspace":
            replacements.append((step.get("replacement", "\u2581"), " "))
            strip = strip or step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                return None
            strip = True

    def to_bytes(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(match[1], 16),))
        return token.encode()

    return TokenSpelling(to_bytes, strip)


def byte_level_bytes(token: str) -> bytes:
    """GPT-2's spelling: every byte is one printable character. Other text (an added token) is itself."""
    try:
        return bytes(map(_CHARACTER_TO_BYTE.__getitem__, token))
    except KeyError:
        return token.encode()


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2: printable Latin-1 bytes are themselves, the others follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_CHARACTER_TO_BYTE = _byte_level_alphabet()
