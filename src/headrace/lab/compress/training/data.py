"""What a student learns from: texts and conversations, and what a model says when it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.frontend.chat_template import ChatTemplate
from headrace.frontend.llm import LLM, SamplingParams
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.compress.calibration import MIN_TOKENS, fingerprint, read_pieces, template_of
from headrace.lab.compress.calibration_data import Piece, mixed
from headrace.model.store import Progress

TEXT_PROMPT_TOKENS = 32
"""Of a text, what is given to be continued; the text goes on to the next prompt a page later."""
SELF = "self"
"""The source whose prompts are questions that the model makes up."""
_QUESTION_TOKENS = 96  # of one that it makes up, at most: longer ones wander
_QUESTION_HEAT = 0.8  # at 1 a small model asks what nobody would
_TRIES = 3  # times as many questions as are wanted, at most, are begun
_PAGE = 256
_AT_A_TIME = 64  # prompts between two reports of progress


@dataclass(frozen=True, slots=True)
class Data:
    """Sequences to learn from, and those that tell how much was learned; none is in both."""

    sequences: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    about: dict[str, Any]


def split(
    sequences: Sequence[tuple[int, ...]], about: dict[str, Any], *, held_out_tokens: int, seed: int
) -> Data:
    """Hold out whole sequences of about so many tokens, at most a fifth of all, drawn by ``seed``.

    Equal ones count once. Raises ConfigError for data that are too short to be split.
    """
    different = list(dict.fromkeys(one for one in sequences if len(one) > 1))
    tokens = sum(map(len, different))
    if len(different) < 2 or tokens < MIN_TOKENS:
        raise ConfigError(
            f"{len(different)} sequences of {tokens} tokens together are too little to learn from and to "
            f"hold some out: give at least {MIN_TOKENS} tokens in several texts, better a hundred thousand."
        )
    limit = min(held_out_tokens, tokens // 5)
    order = np.random.default_rng([seed, 1]).permutation(len(different))
    chosen: set[int] = set()
    held = 0
    for number in order:
        if held + len(different[number]) <= limit or not chosen:
            chosen.add(int(number))
            held += len(different[number])
    kept = tuple(one for number, one in enumerate(different) if number not in chosen)
    out = tuple(one for number, one in enumerate(different) if number in chosen)
    known = {"sequences": len(kept), "tokens": sum(map(len, kept)), "held_out_tokens": held}
    return Data(kept, out, about | known | {"sha256": fingerprint([*kept, *out])})


def read_prompts(
    source: str, tokenizer: Tokenizer, *, chats_only: bool = False, progress: Progress | None = None
) -> Iterator[list[int]]:
    """Prompts out of a calibration source: each question of a conversation, in the model's chat template, and
    beginnings of texts. ``chats_only``: no beginnings, if there is a question at all."""
    template = template_of(tokenizer)
    streams = (
        [list(read_pieces(Path(source)))]
        if source != "default"
        else list(map(list, mixed(progress=progress)))
    )
    asked = template is not None and any(piece.messages for stream in streams for piece in stream)
    if chats_only and asked:
        streams = [[piece for piece in stream if piece.messages] for stream in streams]
    found = [_prompts(stream, tokenizer, template) for stream in streams]
    return (one for together in zip_longest(*found) for one in together if one)


def _prompts(
    pieces: Sequence[Piece], tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[list[int]]:
    for piece in pieces:
        if piece.messages is not None and template is not None:
            for message in piece.messages:
                if message.get("role") == "user":
                    yield tokenizer.encode(template.render([message]), add_special_tokens=False)
            continue
        text = piece.text
        if piece.messages is not None:
            text = "\n\n".join(str(message["content"]) for message in piece.messages)
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), _PAGE):
            yield ids[start : start + TEXT_PROMPT_TOKENS]


def ask_itself(
    model: Path,
    tokenizer: Tokenizer,
    count: int,
    *,
    longest: int,
    seed: int,
    threads: int,
    progress: Progress,
) -> list[list[int]]:
    """Up to ``count`` different questions, in the chat template, that a chat model makes up when it is given
    how a user's turn begins and nothing else. Runs on the engine; the same call gives the same ones.
    ``longest``: tokens of one, with its template.

    Source: Xu et al., "Magpie: Alignment Data Synthesis from Scratch" (arXiv 2406.08464). Raises ConfigError
    for a model without a template, or that asks nothing.
    """
    template = template_of(tokenizer)
    if template is None:
        raise ConfigError(
            f"--data {SELF}: {model} has no chat template, so it has not learned what users ask."
        )
    mark = "\ue000"  # of no language
    begun, _, _ = template.render([{"role": "user", "content": mark}]).partition(mark)
    prompt = tokenizer.encode(begun, add_special_tokens=False)
    room = min(_QUESTION_TOKENS, longest - len(prompt))
    if room < 1:
        raise ConfigError(
            f"--sequence-length leaves no room for questions: a template alone is {len(prompt)}."
        )
    found: dict[tuple[int, ...], None] = {}
    with LLM(str(model), max_model_len=len(prompt) + room, threads=threads) as llm:
        for start in range(0, _TRIES * count, _AT_A_TIME):
            if len(found) >= count:
                break
            progress("asking", len(found), count)
            params = [
                SamplingParams(temperature=_QUESTION_HEAT, max_tokens=room, seed=seed + start + number)
                for number in range(_AT_A_TIME)
            ]
            for answer in llm.generate([prompt] * _AT_A_TIME, params, use_tqdm=False):
                said = answer.outputs[0]
                if said.finish_reason == "stop" and (text := said.text.strip()):
                    asked = template.render([{"role": "user", "content": text}])
                    ids = tokenizer.encode(asked, add_special_tokens=False)
                    if len(ids) <= longest:
                        found[tuple(ids)] = None
    if not found:
        raise ConfigError(f"--data {SELF}: {model} made up no question: give prompts in a file.")
    progress("asking", count, count)
    return [list(one) for one in found][:count]


def generate(
    model: Path,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    sequence_length: int,
    new_tokens: int,
    temperature: float,
    seed: int,
    threads: int,
    progress: Progress,
) -> list[tuple[int, ...]]:
    """``count`` sequences of the model's own: a prompt, and what it says to it, at most ``sequence_length``.

    Runs on the engine, many at a time. Each answer has a seed of its own, so that a prompt can be asked
    again, and the same call gives the same tokens. Raises ConfigError if no prompt leaves room for an answer.
    """
    usable = [list(prompt) for prompt in prompts if 0 < len(prompt) < sequence_length]
    if not usable:
        raise ConfigError(
            f"No prompt is shorter than --sequence-length {sequence_length}, so nothing can be generated."
        )
    found: list[tuple[int, ...]] = []
    with LLM(str(model), max_model_len=sequence_length, threads=threads) as llm:
        for start in range(0, count, _AT_A_TIME):
            progress("generating", start, count)
            numbers = range(start, min(start + _AT_A_TIME, count))
            some = [usable[number % len(usable)] for number in numbers]
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=min(new_tokens, sequence_length - len(prompt)),
                    seed=seed + number,
                    detokenize=False,
                )
                for number, prompt in zip(numbers, some, strict=True)
            ]
            answers = llm.generate(some, params, use_tqdm=False)
            found += [
                (*prompt, *answer.outputs[0].token_ids) for prompt, answer in zip(some, answers, strict=True)
            ]
    progress("generating", count, count)
    return found


def some_prompts(prompts: Iterator[list[int]], count: int) -> list[list[int]]:
    """The first ``count`` different ones."""
    return [list(one) for one in islice(dict.fromkeys(map(tuple, prompts)), count)]
