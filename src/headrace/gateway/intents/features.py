"""Cheap features of a request's text: what can be counted in tens of microseconds, without any model.

They say what an embedding of the whole tells badly: that a text has code or numbers in it, is long, or holds
the word that asks for a summary between paragraphs about something else.
"""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_HEAD, _TAIL = 560, 240  # characters; MiniLM reads 256 tokens, and what is wanted stands at an end

_WORDS: dict[str, str] = {
    "chat": (
        "hello hi hey thanks thank good morning evening how're feel feeling recommend suggest advice tips "
        "favourite favorite weekend dinner lunch capital weather hobby translate translation opinion friend "
        "hallo bonjour hola danke merci gracias"
    ),
    "summarise": (
        "summarise summarize summary summarised summarized tldr tl dr condense condensed shorten recap gist "
        "digest abstract overview boil bullet bullets headline takeaways takeaway minutes abridge sum nutshell "
        "zusammenfassung résumé resumen"
    ),
    "classify": (
        "classify classification categorise categorize category categories label labels sentiment positive "
        "negative neutral spam ham toxic urgent priority topic tag tags bucket assign which whether genre "
        "intent rate rating stars yes no true false kategorie"
    ),
    "extract": (
        "extract extraction extracted pull parse json csv fields field entities names dates emails email phone "
        "address addresses amounts amount find list mentioned mentions identify key value values table column "
        "columns invoice capture collect return"
    ),
    "code": (
        "code function class method python javascript typescript java rust golang bash shell sql query regex "
        "bug debug error exception traceback compile api endpoint script program implement refactor unit test "
        "tests algorithm array string loop html css react docker kubernetes git commit pandas dataframe "
        "decorator thread mutex pointer struct"
    ),
    "maths": (
        "calculate compute solve equation integral derivative integrate differentiate probability percent "
        "percentage area volume perimeter triangle circle sum product matrix eigenvalue eigenvalues determinant "
        "prove theorem prime modulo remainder average mean median variance simplify factor roots polynomial "
        "limit converge series fraction ratio interest speed"
    ),
    "reasoning": (
        "why reason reasoning explain deduce conclude conclusion therefore argue argument trade-offs tradeoffs "
        "tradeoff pros cons compare plan strategy decide decision logic puzzle riddle evaluate assess analyse "
        "analyze analysis implications consequences assumption assumptions fallacy hypothesis cause causes "
        "consistent contradiction liar knight knave scenario weigh justify"
    ),
    "creative": (
        "poem story haiku limerick lyrics song sonnet tale fiction character dialogue scene slogan tagline "
        "brainstorm imagine invent creative write compose fable monologue screenplay novel chapter rhyme "
        "villain hero blurb ode gedicht poème poema"
    ),
}
_LEXICON: dict[str, list[int]] = {}
for _number, _group in enumerate(_WORDS.values()):
    for _word in _group.split():
        _LEXICON.setdefault(_word, []).append(_number)

_HARD = frozenset(
    "prove proof optimise optimize optimal concurrent distributed rigorous derive trade-offs tradeoffs detailed "
    "thorough comprehensive scalable thread-safe lock-free asymptotic complexity edge counterexample "
    "assumptions critique multi-step constraints nuanced efficient production robust migrate architecture "
    "necessary sufficient incentives second-order".split()
)
_EASY = frozenset("simple quick quickly short brief briefly basic easy just one-line one-liner".split())
_QUESTION = frozenset("what who when where which whose how is are do does can could should would did was".split())
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_CODE = re.compile(r"[{};]|=>|->|==|!=|\(\)|\w\(|</|::|\bdef \b|\bSELECT\b|\breturn\b|\bimport\b")
_EQUATION = re.compile(r"[0-9a-z)]\s*[-+*/^=×÷]\s*[0-9a-z(]|[√∫∑π≤≥²³]|\\frac")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")

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
    "first_person",
    "hard_words",
    "easy_words",
    *(f"{group}_words" for group in _WORDS),
    *(f"{group}_at_the_ends" for group in _WORDS),
    *(f"{group}_first" for group in _WORDS),
)
"""The features, in their order; a classifier file names those that it was made for."""


def shown(text: str) -> str:
    """What of a text is read: its beginning and its end, where people say what they want."""
    text = text.strip()
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"


def features(text: str) -> Floats:
    """float32 [len(NAMES)]. Of a long text the length counts, and else its beginning and end."""
    whole, text = len(text), shown(text)
    length = max(len(text), 1)
    words = [word.lower() for word in _WORD.findall(text)]
    count = max(len(words), 1)
    lines = text.split("\n")
    numbers = _NUMBER.findall(text)
    first = words[0] if words else ""
    out = [
        math.log1p(whole),
        math.log1p(len(words)),
        math.log1p(text.count("\n")),
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
        sum(word in ("i", "me", "my", "i'm", "i've", "we", "our") for word in words) / count,
        math.log1p(sum(word in _HARD for word in words)),
        math.log1p(sum(word in _EASY for word in words)),
    ]
    ends = words[:12] + words[max(len(words) - 12, 12) :]
    for part in (words, ends, words[:3]):
        hits = [0] * len(_WORDS)
        for word in part:
            for group in _LEXICON.get(word, ()):
                hits[group] += 1
        out += [math.log1p(hit) for hit in hits]
    return np.array(out, dtype=np.float32)
