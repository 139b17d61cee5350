"""NgramIndex: where a text has said before what it says now, and how often it went on in the same way."""

from __future__ import annotations

from array import array

_WINDOW = 2**15  # positions that are remembered of one text
_LONGEST_WALK = 32  # earlier occurrences that are compared
_HASH_FACTOR = 0x9E3779B1

_NEAR_BEFORE, _NEAR_AFTER = 8, 24  # tokens around the place where a copy was left that it may go on from
_NEAR_FOR = 24  # tokens, since it was left, that it is looked for there

# What is known of a match: its length in steps, those of a copy's neighbourhood apart while they are short.
_NEAR_LENGTHS = 3
_LENGTHS = (1, 2, 3, 4, 6, 9, 16, 32)  # from which length on each further kind of match begins
_KINDS = _NEAR_LENGTHS + len(_LENGTHS)
_PRIOR = (0.5, 0.6, 0.7, 0.2, 0.3, 0.5, 0.6, 0.75, 0.85, 0.93, 0.97)
_PRIOR_TRIES = 4.0  # that a rate nobody has measured is worth
_KEPT = 0.94  # of what earlier tokens said about a kind of match, at each new one

_KIND_OF = [_NEAR_LENGTHS - 1 + sum(length >= least for least in _LENGTHS) for length in range(_LENGTHS[-1] + 1)]


class HitRates:
    """How often the token that a match says comes next did come, by kind of match.

    Every token of an answer is a try, whether it was drafted or not: what is not worth drafting is judged all
    the same, and nothing has to be verified to find out that it would pay. ``prior``: whose rates count until
    there are own ones.
    """

    def __init__(self, prior: HitRates | None = None) -> None:
        self._prior = prior
        self._tries = [0.0] * _KINDS
        self._hits = [0.0] * _KINDS

    def rate(self, kind: int) -> float:
        """The chance that the next token is the one that a match of this kind says."""
        prior = _PRIOR[kind] if self._prior is None else self._prior.rate(kind)
        return (self._hits[kind] + _PRIOR_TRIES * prior) / (self._tries[kind] + _PRIOR_TRIES)

    def note(self, kind: int, hit: bool) -> None:
        """It was, or was not."""
        self._tries[kind] = _KEPT * self._tries[kind] + 1.0
        self._hits[kind] = _KEPT * self._hits[kind] + hit
        if self._prior is not None:
            self._prior.note(kind, hit)


class NgramIndex:
    """Where the n-grams of one growing text occur, and the place that it is copying from.

    A copy is followed as long as it goes on. Where it is left (a word is replaced, left out or put in), it is
    looked for near that place first: there a single equal token says much, and none at all that one token was
    replaced by one. Else the longest match counts, of the last 32 occurrences the latest among equals, with
    up to ``longest`` tokens compared and at least ``shortest`` equal.

    Positions whose ``shortest`` tokens have one hash are chained, the latest first, over the last 32768
    positions: constant time for a token, 4 bytes for it, and at most 256 KiB for the chains.
    """

    def __init__(self, shortest: int, longest: int, rates: HitRates | None = None) -> None:
        """``rates``: of other texts, which count until there are own ones, and take part in them."""
        self._shortest = shortest
        self._longest = longest
        self._rates = HitRates(rates)
        self._tokens = array("i")
        self._heads = array("i")  # latest position of each hash; -1 = none
        self._earlier = array("i")  # by position modulo its length: the one before with the same hash
        self._source = -1  # what stands there comes next, if the text goes on as it did then; -1 = no match
        self._length = 0  # tokens before it that are equal
        self._is_near = False  # whether it was found near the place where the last copy was left
        self._left = -1  # the source of the last copy when it was left; -1 = never
        self._left_at = 0  # length of the text then

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that follow."""
        start = len(self._tokens)
        self._tokens.extend(token_ids)
        if self._source >= 0:
            self._follow(start)
        if len(self._tokens) > len(self._heads) < _WINDOW:
            self._resize()
            start = 0
        # The last n-gram is left out until something follows it: it would only find itself.
        for end in range(max(start, self._shortest), len(self._tokens)):
            slot = self._slot(end)
            self._earlier[end % len(self._earlier)] = self._heads[slot]
            self._heads[slot] = end

    def continuation(self, limit: int) -> list[int]:
        """At most ``limit`` tokens that followed the best earlier match of the text's end."""
        if limit <= 0:
            return []
        if self._source < 0:
            self._search()
            if self._source < 0:
                return []
        source, count = self._source, len(self._tokens)
        draft = self._tokens[source : source + limit].tolist()
        period = count - source  # a text that repeats itself goes on repeating
        while len(draft) < limit:
            draft.append(draft[len(draft) - period])
        return draft

    def chances(self, count: int) -> list[float]:
        """Of each of the first ``count`` tokens of the continuation, given that those before it were right."""
        length, last = self._length, len(_KIND_OF) - 1
        rates: dict[int, float] = {}
        found = []
        for at in range(length, length + count):
            kind = at if self._is_near and at < _NEAR_LENGTHS else _KIND_OF[min(at, last)]
            if kind not in rates:
                rates[kind] = self._rates.rate(kind)
            found.append(rates[kind])
        return found

    def _follow(self, start: int) -> None:
        """Compare the tokens from ``start`` on with those of the source."""
        tokens, last = self._tokens, len(_KIND_OF) - 1
        for at in range(start, len(tokens)):
            length = self._length
            kind = length if self._is_near and length < _NEAR_LENGTHS else _KIND_OF[min(length, last)]
            hit = tokens[at] == tokens[self._source]
            self._rates.note(kind, hit)
            if not hit:
                self._left, self._left_at = self._source, at
                self._source = -1
                return
            self._source += 1
            self._length += 1

    def _search(self) -> None:
        """Find a match of the text's end."""
        best, best_length = self._near()
        is_near = best >= 0
        tokens, count = self._tokens, len(self._tokens)
        at = self._heads[self._slot(count)] if count > self._shortest else -1
        best_length = max(best_length, self._shortest - 1) if not is_near else best_length
        for _ in range(_LONGEST_WALK):
            if at < 0 or at <= count - len(self._earlier):
                break
            length = 0
            while length < self._longest and length < at and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length and length >= self._shortest:
                best, best_length, is_near = at, length, False
                if length == self._longest:
                    break
            at = self._earlier[at % len(self._earlier)]
        self._source, self._length, self._is_near = best, best_length, is_near

    def _near(self) -> tuple[int, int]:
        """``(source, length)`` of the longest match near the place where a copy was left; (-1, 0) = none."""
        tokens, count, left = self._tokens, len(self._tokens), self._left
        since = count - self._left_at
        if left < 0 or since > _NEAR_FOR:
            return -1, 0
        level = left + since  # as if tokens had been replaced one by one
        best, best_length = -1, 0
        if since == 1:
            best = level
        start, stop = max(1, left - _NEAR_BEFORE), min(count - 1, left + _NEAR_AFTER)
        for at in range(start, stop + 1):
            length = 0
            while length < self._longest and length < at and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length or (
                length == best_length and length and abs(at - level) < abs(best - level)
            ):
                best, best_length = at, length
        return (best, best_length) if best < count else (-1, 0)

    def _resize(self) -> None:
        size = min(_WINDOW, max(256, 1 << (2 * len(self._tokens) - 1).bit_length()))
        self._heads = array("i", [-1]) * size
        self._earlier = array("i", [-1]) * size

    def _slot(self, end: int) -> int:
        """The chain of the n-gram that ends before ``end``."""
        key = 0
        for token in self._tokens[end - self._shortest : end]:
            key = (key ^ token) * _HASH_FACTOR & 0xFFFFFFFF
        return key * len(self._heads) >> 32
