"""Cheap features of a request's text: what can be counted in about a hundred microseconds, without any model.

They say what an embedding of the whole tells badly: that a text has code or numbers in it, is long, or holds
the word that asks for a summary between paragraphs about something else.
"""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from headrace.gateway.intents.lexicon import EASY, HARD, QUESTION, WORDS

Floats = npt.NDArray[np.float32]

_HEAD, _TAIL = 560, 240  # characters that are counted in
_LINE, _QUOTE = 100, 24  # characters of a line, and of a quotation, that are embedded
_LINES = 4  # at either end
_SHORT = 260  # whole, quotations aside

_LEXICON: dict[str, list[int]] = {}
for _number, _group in enumerate(WORDS.values()):
    for _word in _group.split():
        _LEXICON.setdefault(_word, []).append(_number)
_HARD, _EASY, _QUESTION = frozenset(HARD.split()), frozenset(EASY.split()), frozenset(QUESTION.split())
_FIRST_PERSON = frozenset(("i", "me", "my", "i'm", "i've", "we", "our"))

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_CODE = re.compile(r"[{};]|=>|->|==|!=|\(\)|\w\(|</|::|\bdef \b|\bSELECT\b|\breturn\b|\bimport\b")
_EQUATION = re.compile(r"[0-9a-z)]\s*[-+*/^=×÷]\s*[0-9a-z(]|[√∫∑π≤≥²³]|\\frac")
_QUOTED = re.compile(r"([\"“„«][^\"“”„«»\n]{32,})[\"”“»]")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")
_OPTIONS = re.compile(  # to choose from: "b or c", "yes/no", "{low, high}"
    r"\w,? (?:or|oder|ou) \w|\b\w{1,14} ?[/|] ?\w{1,14}\b|[{\[(][^{}\[\](),]{1,30},[^{}\[\]()]{1,90}[}\])]"
)
_FORMAT = re.compile(  # of the answer: "only the dates", "as JSON", "reply with one word"
    r"\b(?:only|just|nothing but|exactly|one word|single \w+|one per line|schema|format"
    r"|(?:answer|reply|respond|output|print|return|give|say|tell)(?: me)? (?:with|as|in|only|just|for|yes)"
    r"|as (?:a )?(?:json|csv|list|table|rows?))\b",
    re.IGNORECASE,
)
_BOUNDED = re.compile(  # in length: "two sentences", "at most 30 words", "shorter"
    r"\b(?:\d+|one|two|three|four|five|six|thirty|forty|fifty|few(?:er)?|short(?:er)?|half)[\s-]"
    r"(?:main |key |important )?(?:words?|sentences?|lines?|bullets?|points?|paragraphs?|version)\b"
    r"|\b(?:short(?:er|en)?|brief(?:ly)?|concise)\b",
    re.IGNORECASE,
)

NAMES: tuple[str, ...] = (
    "log_characters",
    "log_words",
    "log_lines",
    "mean_word",
    "number_density",
    "log_numbers",
    "code_fence",
    "code_marks",
    "indented_lines",
    "equations",
    "question_marks",
    "ends_in_question",
    "opens_with_question_word",
    "opens_with_why_or_how",
    "other_script",
    "names",
    "colons",
    "quotes",
    "quoted_share",
    "handed_over_share",
    "options",
    "answer_format",
    "bounded_length",
    "first_person",
    "hard_words",
    "easy_words",
    *(f"{group}_words" for group in WORDS),
    *(f"{group}_at_the_ends" for group in WORDS),
    *(f"{group}_first" for group in WORDS),
)
"""The features, in their order; a classifier file names those that it was made for."""


def features(text: str) -> Floats:
    """float32 [len(NAMES)]. Of a long text the length counts, and else its beginning and end."""
    whole, text = len(text), _ends(text)
    length = max(len(text), 1)
    words = [word.lower() for word in _WORD.findall(text)]
    count = max(len(words), 1)
    lines = text.split("\n")
    numbers = _NUMBER.findall(text)
    first = words[0] if words else ""
    out = [
        math.log1p(whole),
        math.log1p(len(words)),
        math.log1p(len(lines) - 1),
        sum(map(len, words)) / count,
        sum(map(len, numbers)) / length,
        math.log1p(len(numbers)),
        float("```" in text),
        math.log1p(len(_CODE.findall(text))),
        sum(line.startswith(("  ", "\t")) for line in lines) / len(lines),
        math.log1p(len(_EQUATION.findall(text))),
        math.log1p(text.count("?")),
        float(text.endswith("?")),
        float(first in _QUESTION),
        float(first in ("why", "how")),
        sum(ord(letter) > 0x24F for letter in text) / length,  # beyond Latin
        len(_NAME.findall(text)) / count,
        math.log1p(text.count(":")),
        math.log1p(text.count('"') + text.count("“")),
        sum(len(match[0]) for match in _QUOTED.finditer(text)) / length,
        max(len(text) - 1 - text.find(":"), 0) / length if ":" in text else 0.0,
        math.log1p(len(_OPTIONS.findall(text))),
        math.log1p(len(_FORMAT.findall(text))),
        math.log1p(len(_BOUNDED.findall(text))),
        sum(word in _FIRST_PERSON for word in words) / count,
        math.log1p(sum(word in _HARD for word in words)),
        math.log1p(sum(word in _EASY for word in words)),
    ]
    ends = words[:12] + words[max(len(words) - 12, 12) :]
    for part in (words, ends, words[:3]):
        hits = [0] * len(WORDS)
        for word in part:
            for group in _LEXICON.get(word, ()):
                hits[group] += 1
        out += [math.log1p(hit) for hit in hits]
    return np.array(out, dtype=np.float32)


def embedded(text: str) -> str:
    """What of a text goes to the embedder: rather what is wanted than what it is wanted with.

    People say what they want at the beginning or at the end, and in lines of their own where they hand over a
    document. So of quotations and long lines only the beginning stays (of the last line, the end as well),
    and of many lines the first and the last.
    """
    text = _QUOTED.sub(lambda match: f"{match[1][: _QUOTE + 1]}…{match[1][0]}", _ends(text))
    if len(text) <= _SHORT:
        return text
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 2 * _LINES:
        lines = [*lines[:_LINES], *lines[-_LINES:]]
    short = [line if len(line) <= _LINE else f"{line[:_LINE]}…" for line in lines]
    if len(lines[-1]) > 2 * _LINE:
        short[-1] += f" {lines[-1][-_LINE:]}"
    return "\n".join(short)


def _ends(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"
