"""What a model is shown while it is compressed: token sequences from the user's file, or from packages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, InvalidRequestError
from headrace.frontend.chat_template import ChatTemplate, checked_messages
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.bench.workload import json_lines
from headrace.lab.compress.calibration_data import MIXED, Piece, mixed
from headrace.model.store import Progress

MIN_TOKENS = 256
"""Fewer say too little about a model's inputs."""
RUN = 16
"""Tokens in a row that two texts share only where one was copied from the other."""
_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|turn>")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sequences of token ids, none padded. ``about`` says where they come from and how they were made."""

    sequences: tuple[tuple[int, ...], ...]
    about: dict[str, Any]

    @property
    def tokens(self) -> int:
        """How many there are in all."""
        return sum(map(len, self.sequences))

    def runs(self) -> set[tuple[int, ...]]:
        """All that stands anywhere in RUN tokens in a row."""
        return {
            sequence[start : start + RUN]
            for sequence in self.sequences
            for start in range(0, len(sequence) - RUN + 1)
        }

    @property
    def fingerprint(self) -> str:
        """Equal for the same sequences in the same order."""
        return str(self.about["sha256"])


def read_calibration(
    source: str,
    tokenizer: Tokenizer,
    *,
    samples: int,
    sequence_length: int,
    chat_template: Literal["auto", "off"] = "auto",
    progress: Progress | None = None,
) -> Calibration:
    """``samples`` sequences of up to ``sequence_length`` tokens.

    ``source``: ``default``, a mix out of packages, or a JSON Lines file of ``{"text": …}``,
    ``{"messages": […]}`` or ``{"prompt": …, "completion": …}``. Conversations are written by the model's chat
    template; "off" writes their contents as plain text. Texts begin with BOS where the model's prompts do, at
    every cut; conversations begin as the template has it. What is longer than a sequence is cut: texts go on
    in the next one, conversations end. Raises ConfigError for a malformed line, a template that is missing or
    another model's, and text that is too short.
    """
    template = template_of(tokenizer) if chat_template == "auto" else None
    if source == "default":
        streams = [_cut(pieces, tokenizer, template, sequence_length) for pieces in mixed(progress=progress)]
        found: Iterator[list[int]] = (
            one for together in zip_longest(*streams) for one in together if one is not None
        )
    else:
        pieces = read_pieces(Path(source))
        found = _cut(pieces, tokenizer, template, sequence_length, template_needed=chat_template)
    chosen = tuple(map(tuple, islice(found, samples)))
    calibration = Calibration(
        chosen,
        {
            "source": MIXED if source == "default" else Path(source).name,
            "sequences": len(chosen),
            "tokens": sum(map(len, chosen)),
            "sequence_length": sequence_length,
            "bos": _leading_bos(tokenizer) is not None,
            "chat_template": template is not None,
            "sha256": fingerprint(chosen),
        },
    )
    if calibration.tokens < MIN_TOKENS:
        raise ConfigError(
            f"--calibration {source}: {calibration.tokens} tokens are too few to calibrate with: give at "
            f"least {MIN_TOKENS}, better some ten thousand."
        )
    return calibration


def fingerprint(sequences: Sequence[Sequence[int]]) -> str:
    """Equal for the same sequences in the same order."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(repr(sequence).encode())
    return digest.hexdigest()[:16]


def require_apart(calibration: Calibration, evaluated: Sequence[int]) -> None:
    """Raise ConfigError if more than a hundredth of the evaluated text is in the calibration, literally."""
    runs = calibration.runs()
    texts = [tuple(evaluated[start : start + RUN]) for start in range(0, len(evaluated) - RUN + 1, RUN)]
    shared = sum(run in runs for run in texts)
    if texts and shared > len(texts) / 100:
        raise ConfigError(
            f"{shared / len(texts):.0%} of the text that is to judge the model is in the calibration, word "
            "for word: the numbers would flatter it. Give another --calibration or another --text."
        )


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, if it has one."""
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _leading_bos(tokenizer: Tokenizer) -> int | None:
    from headrace.lab.evaluate.texts import leading_bos

    return leading_bos(tokenizer)


def read_pieces(path: Path) -> Iterator[Piece]:
    """The texts and conversations of a JSON Lines file. Raises ConfigError for a malformed line."""
    for value, where in json_lines(path):
        yield _piece(value, where)


def _piece(value: dict[str, Any], where: str) -> Piece:
    kinds = [key for key in ("text", "messages", "prompt") if key in value]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: a line needs `text`, `messages`, or `prompt` and `completion`")
    if kinds[0] == "messages":
        try:
            return Piece(where, messages=checked_messages(value["messages"]))
        except InvalidRequestError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    keys = ("text",) if kinds[0] == "text" else ("prompt", "completion")
    texts = []
    for key in keys:
        text = value.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: `{key}` must be a text that is not empty")
        texts.append(text)
    if len(texts) == 1:
        return Piece(where, text=texts[0])
    asked, answered = (
        {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
    )
    return Piece(where, messages=[asked, answered])


def _cut(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    length: int,
    *,
    template_needed: Literal["auto", "off"] = "off",
) -> Iterator[list[int]]:
    """Sequences of up to ``length`` tokens out of the pieces, one after the other."""
    bos = _leading_bos(tokenizer)
    for piece in pieces:
        if piece.messages is not None and template is not None:
            yield _conversation(piece, tokenizer, template)[:length]
            continue
        if piece.messages is not None and template_needed == "auto":
            raise ConfigError(
                f"{piece.where}: the model has no chat template to write messages with: give `text`, or "
                "--calibration-template off to take their contents as plain text."
            )
        text = piece.text if piece.messages is None else "\n\n".join(m["content"] for m in piece.messages)
        _require_own_marks(piece.where, text, tokenizer)
        ids = _encoded(piece.where, text, tokenizer)
        room = length - (bos is not None)
        for start in range(0, len(ids), room):
            yield [*([] if bos is None else [bos]), *ids[start : start + room]]


def _conversation(piece: Piece, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    try:
        text = template.render(piece.messages or [], add_generation_prompt=False)
    except InvalidRequestError as error:
        raise ConfigError(f"{piece.where}: {error.message}") from None
    return _encoded(piece.where, text, tokenizer)


def _encoded(where: str, text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _require_own_marks(where: str, text: str, tokenizer: Tokenizer) -> None:
    for mark in _MARKS:
        if mark in text and tokenizer.token_id(mark) is None:
            raise ConfigError(
                f"{where}: {mark!r} is no token of this model: the text is written in another model's chat "
                "template. Give `messages`, and the model's own template will write them."
            )
