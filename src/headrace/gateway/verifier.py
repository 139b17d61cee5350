"""Whether two questions that lie close together may have the same answer: what similarity does not see.

Sentence encoders put "convert miles to km" and "convert km to miles" almost on the same spot. This reads
both texts, word by word, and refuses where they differ in what changes an answer: a negation, a number, a
unit, a time, a name, an opposite, who does what to whom, what is asked for, the language. It is made for
English; texts in other languages pass only with the same words in the same order. A pass proves nothing: how
often questions that pass do have the same answer is learned (:mod:`headrace.gateway.thresholds`).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.gateway import verifier_words as words

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*(?:st|nd|rd|th)?(?![^\W_])|[^\W_]+(?:[-.][^\W_]+)*|[^\w\s]")
_PUNCTUATION = frozenset(".,;:!?()[]{}\"'’‘“”„«»-–—…")
_VOWEL = re.compile(r"[aeiouy]")
_WORD = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"(?:^|[.!?:]\s+|[\"“‘(])\W*$")
_PAST, _PRESENT = {"was", "were", "did", "had"}, {"is", "are", "am", "does", "do", "has"}
_DO = {"do", "does", "did"}
_PERSONS = {
    **dict.fromkeys(("he", "him", "his"), "he"),
    **dict.fromkeys(("she", "her", "hers"), "she"),
    **dict.fromkeys(("they", "them", "their", "theirs"), "they"),
    **dict.fromkeys(("my", "mine", "our", "ours"), "i"),
    **dict.fromkeys(("your", "yours"), "you"),
}
_LONGEST = 4000  # characters that are read


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says, as far as this module can tell. ``stems``: its content words, in order."""

    words: tuple[str, ...]
    stems: tuple[str, ...]
    names: frozenset[str]  # of the stems, those written as names or with digits
    numbers: tuple[str, ...]  # in order
    units: frozenset[str]
    symbols: tuple[str, ...]  # sorted
    negations: int
    question: str | None
    modes: frozenset[str]
    persons: frozenset[str]
    roles: frozenset[tuple[str, str]]  # (preposition, stem behind it)
    language: str


@functools.lru_cache(maxsize=2048)
def read(text: str) -> Reading:
    """Read a text; of a very long one, the beginning."""
    text = text[:_LONGEST].replace("’", "'")
    spoken = text.casefold()
    for pattern, replacement in words.PHRASES:
        spoken = pattern.sub(replacement, spoken)
    tokens = [token for token in _TOKEN.findall(spoken) if token not in _PUNCTUATION]
    asked, question = _question(tokens)
    names = _names(text)
    found = _Content()
    for place, token in enumerate(tokens):
        found.take(token, tokens[place - 1] if place else "", names)
    if found.direction:
        found.roles.add((found.direction, ""))
    return Reading(
        words=tuple(tokens),
        stems=tuple(found.stems),
        names=frozenset(found.names),
        numbers=tuple(found.numbers),
        units=frozenset(found.units),
        symbols=tuple(sorted(found.symbols)),
        negations=found.negations,
        question=question,
        modes=frozenset(mode for mode, marks in words.MODES.items() if marks & asked),
        persons=frozenset(_PERSONS[token] for token in tokens if token in _PERSONS),
        roles=frozenset(found.roles),
        language=_language(tokens),
    )


def refusal(one: Reading, other: Reading) -> str | None:
    """Why the texts must not be taken for the same question; None if nothing speaks against it."""
    if one.words == other.words:
        return None
    if one.language != other.language or one.language != "English":
        return "language"
    if (why := _contradiction(one, other)) is not None:
        return why
    mine, others = _extras(one, other), _extras(other, one)
    if any(stem in words.TIMES for stem in mine | others):
        return "time"
    if any(stem in words.LIMITING for stem in mine | others):
        return "scope"
    if one.symbols != other.symbols:
        return "symbol"
    if not _same_kind(one, other):
        return "question"
    if one.persons != other.persons and one.persons and other.persons:
        return "person"
    if _roles_differ(one, other):
        return "roles"
    return None


def agreement(one: Reading, other: Reading, asked: Reading, asked_too: Reading) -> bool | None:
    """Whether two answers to the questions ``asked`` and ``asked_too`` say the same; None if it takes more
    than words to see. What an answer only repeats of its question says nothing: "Paris" is "The capital of
    France is Paris".
    """
    if one.words == other.words:
        return True
    if one.negations != other.negations:
        return False
    said_before = {*asked.stems, *asked_too.stems, *_ANSWERING}
    mine, others = (_extras(one, other) - said_before, _extras(other, one) - said_before)
    if not mine and not others:
        return True
    facts = {*one.names, *other.names, *one.numbers, *other.numbers, *one.units, *other.units}
    if (mine | others) & facts or any(_opposite(a, b) for a in mine for b in others):
        return False
    return None


def loose(one: Reading, other: Reading) -> bool:
    """Of two texts that pass: whether they differ in words or order whose weight this cannot judge."""
    if one.words == other.words:
        return False
    modes_differ = one.modes != other.modes and "whether" in (one.question, other.question)
    return Counter(one.stems) != Counter(other.stems) or modes_differ or not _in_step(one, other)


def stem_of(word: str) -> str:
    """A word without its endings, one for all synonyms. Rough: only that it is the same each time counts."""
    word = words.IRREGULAR.get(word, word)
    stem = _bare(word)
    return _SYNONYMS.get(stem, stem)


class _Content:
    """Gathers what the words of a text say, in their order."""

    def __init__(self) -> None:
        self.stems: list[str] = []
        self.names: set[str] = set()
        self.numbers: list[str] = []
        self.units: set[str] = set()
        self.symbols: list[str] = []
        self.roles: set[tuple[str, str]] = set()
        self.negations = 0
        self.direction = ""  # a preposition whose word has not come yet
        self._joined = False  # "and" or "or" stands right behind the last stem

    def take(self, token: str, before: str, names: frozenset[str]) -> None:
        joined, self._joined = self._joined, False
        if token in words.NEGATIONS:
            self.negations += 1
        elif token in words.DIRECTIONS:
            self.direction = words.DIRECTIONS[token]
        elif (number := _number(token)) is not None:
            self.numbers.append(number)
            self._add(number, joined)
        elif (unit := _unit(token, before)) is not None:
            if token in ("year", "day", "month") and before in ("what", "which"):
                return
            self.units.add(unit)
            self._add(unit, joined)
        elif token in words.FILLERS:
            self._joined = joined or token in ("and", "or", "vs", "versus")
            if token in ("who", "whom", "what", "which"):
                self.direction = ""
        elif not token[0].isalnum():
            self.symbols.append(token)
        elif not (
            (token in words.DEGREES and before == "how")
            or (token in words.OPENERS and not self.stems)
            or (token in ("time", "date") and before in ("what", "which"))
        ):
            stem = stem_of(token)
            if token in names or any(letter.isdigit() for letter in token):
                self.names.add(stem)
            self._add(stem, joined)

    def _add(self, stem: str, joined: bool) -> None:
        """What "and" or "or" joins has no order: "tea or coffee" is "coffee or tea"."""
        if self.direction:
            self.roles.add((self.direction, stem))
            self.direction = ""
        if joined and self.stems and stem < self.stems[-1]:
            self.stems.insert(-1, stem)
        else:
            self.stems.append(stem)


def _contradiction(one: Reading, other: Reading) -> str | None:
    if sorted(one.numbers) != sorted(other.numbers):
        return "number"
    if one.units != other.units:
        return "unit"
    if one.negations != other.negations:
        return "negation"
    mine, others = _extras(one, other), _extras(other, one)
    if any(stem in one.names or stem in other.names for stem in mine | others):
        return "name"
    if any(_opposite(a, b) for a in mine for b in others):
        return "opposite"
    return None


def _question(tokens: list[str]) -> tuple[frozenset[str], str | None]:
    """The words behind what is said before a question, and what it asks for."""
    asked = " ".join(tokens)
    whether = False
    while (found := words.PRELUDE.match(asked)) is not None:
        whether = found[0].strip() in ("if", "whether")
        asked = asked[found.end() :]
    kind: str | None = "whether" if whether or words.AUXILIARY.match(asked) else None
    if kind is None:
        first = len(asked)
        for name, pattern in words.QUESTIONS:
            place = pattern.search(asked)
            if place is not None and place.start() < first:
                kind, first = name, place.start()
    return frozenset(asked.split()), kind


def _same_kind(one: Reading, other: Reading) -> bool:
    """Whether the same kind of thing is asked for, at the same time."""
    kinds = {one.question, other.question}
    if len(kinds) == 2:
        open_kinds = {"what", "how", "how much"} if None in kinds else {"what", "how much"}
        if not kinds <= {None, *open_kinds} or (None not in kinds and not one.numbers):
            return False
    if kinds == {"whether"} and one.modes and other.modes and not one.modes & other.modes:
        return False
    tenses = [(bool(_PAST & set(text.words)), bool(_PRESENT & set(text.words))) for text in (one, other)]
    return {(True, False), (False, True)} != set(tenses)


def _roles_differ(one: Reading, other: Reading) -> bool:
    """Whether the same words stand in other roles."""
    if one.numbers != other.numbers or not (_in_step(one, other) or _one_moved(one, other)):
        return True
    for a, b in ((one, other), (other, one)):
        for direction, stem in a.roles:
            theirs = {name for name, word in b.roles if word == stem}
            if direction in theirs or (stem and stem not in b.stems):
                continue
            if theirs or direction in words.STRICT_DIRECTIONS:
                return True
            same = {word for name, word in b.roles if name == direction}
            if (
                same
                and not same & {word for name, word in a.roles if name == direction}
                and same <= {*a.stems}
            ):
                return True
    if one.question == other.question and one.question in ("who", "what"):
        # "who did Napoleon defeat" is not "who defeated Napoleon"
        helped = {bool(_DO & set(text.words)) for text in (one, other)}
        return len(helped) == 2 and _shared(one, other) != _shared(other, one)
    return False


def _in_step(one: Reading, other: Reading) -> bool:
    """Whether the words that both have follow each other alike, but for a part moved from end to end."""
    mine, others = _shared(one, other), _shared(other, one)
    return mine == others or any(mine == others[n:] + others[:n] for n in range(1, len(others)))


def _one_moved(one: Reading, other: Reading) -> bool:
    mine, others = _shared(one, other), _shared(other, one)
    for place, stem in enumerate(mine):
        rest = mine[:place] + mine[place + 1 :]
        if any(rest == others[:n] + others[n + 1 :] for n, word in enumerate(others) if word == stem):
            return True
    return False


def _shared(text: Reading, other: Reading) -> list[str]:
    """Stems of ``text`` that ``other`` has too, each as often as both have it."""
    left = Counter(text.stems) & Counter(other.stems)
    out = []
    for stem in text.stems:
        if left[stem] > 0:
            left[stem] -= 1
            out.append(stem)
    return out


def _extras(text: Reading, other: Reading) -> set[str]:
    return set((Counter(text.stems) - Counter(other.stems)).keys())


def _opposite(one: str, other: str) -> bool:
    if frozenset((one, other)) in _OPPOSITES:
        return True
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) > 2 and any(longer == prefix + shorter for prefix in words.PREFIXES)


def _bare(word: str) -> str:
    if word in _KEPT:
        return word
    if word.endswith("s") and len(word) > 3 and not word.endswith(("ss", "us", "is")):
        word = f"{word[:-3]}y" if word.endswith("ies") and len(word) > 4 else word[:-1]
    if word in _KEPT:
        return word
    for ending in ("ing", "ed", "ly"):
        root = word.removesuffix(ending)
        if root != word and len(root) > 2 and _VOWEL.search(root):
            word = root[:-1] if root[-1] == root[-2] and root[-1] not in "lsz" else root
            break
    return word.removesuffix("e") if len(word) > 3 else word


_KEPT = words.TIMES | words.LIMITING
_ANSWERING = frozenset(_bare(word) for word in words.ANSWERING)
_SYNONYMS = {_bare(word): _bare(first) for word, first in words.SYNONYMS.items()}
_OPPOSITES = frozenset(frozenset(stem_of(word) for word in pair) for pair in words.OPPOSITES)


def _number(token: str) -> str | None:
    if token in words.NUMBERS:
        return words.NUMBERS[token]
    if not token[0].isdigit() or not token.rstrip("stndrh").replace(",", "").replace(".", "").isdigit():
        return None
    plain = token.replace(",", "")
    return plain.rstrip("0").rstrip(".") if plain.count(".") == 1 else plain


def _unit(token: str, before: str) -> str | None:
    if token in words.LETTER_UNITS:
        counted = before[:1].isdigit() or before in ("many", "much", "degrees", "degree", "°")
        return words.LETTER_UNITS[token] if counted else None
    return words.UNITS.get(token)


def _names(text: str) -> frozenset[str]:
    """Words written with a capital where no sentence begins, in lower case."""
    return frozenset(
        found[0].casefold()
        for found in _WORD.finditer(text)
        if found[0][0].isupper() and found[0] != "I" and not _SENTENCE_END.search(text[: found.start()][-40:])
    )


def _language(tokens: Iterable[str]) -> str:
    letters = [letter for token in tokens for letter in token if letter.isalpha()]
    if sum(letter > "\u024f" for letter in letters) > 0.3 * len(letters):
        return "another script"
    found = set(tokens)
    best, most = "English", max(len(found & words.ENGLISH), 1)
    for language, common in words.FOREIGN.items():
        if (count := len(found & common)) > most:
            best, most = language, count
    return best
