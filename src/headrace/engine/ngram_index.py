"""NgramIndex: where a text has said before what it says now, and how often it went on in the same way."""

from __future__ import annotations

from array import array

_WINDOW = 2**15  # positions that are remembered of one text
_LONGEST_WALK = 32  # earlier occurrences that are compared
_HASH_FACTOR = 0x9E3779B1

_NEAR_BEFORE, _NEAR_AFTER = 8, 24  # tokens around the place where a copy was left that it may go on from
_NEAR_FOR = 24  # tokens, since it was left, that it is looked for there
_LEAST_COPY = 6  # tokens, from which on equal ones are no chance
_SURE = 2  # tokens that a match has to go on for, until what it says about edits counts
_LONGEST_EDIT = 8  # tokens that were replaced, or came instead
_REPLACED, _COPIED, _MOST_VOTES = 2, -1, 3  # what each says of whether a token is replaced the next time

# What is known of a token that a copy says comes next: the length of the match before it in steps, those of a
# copy's neighbourhood apart while they are short, and what an edit puts there.
_NEAR_LENGTHS = 3
_LENGTHS = (1, 2, 3, 4, 6, 9, 16, 32)  # from which length on each further kind begins
_PRIOR = (0.4, 0.6, 0.7, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.92, 0.97, 0.6)
_EDIT = len(_PRIOR) - 1
_PRIOR_TRIES = 4.0  # that a rate nobody has measured is worth
_KEPT = 0.94  # of what earlier tokens said about a kind, at each new one

_KIND_OF = [
    _NEAR_LENGTHS - 1 + sum(length >= least for least in _LENGTHS) for length in range(_LENGTHS[-1] + 1)
]


class HitRates:
    """How often the token that was expected did come, by what was known of it.

    Every token that was expected is a try, drafted or not: what is not worth drafting is judged
    all the same, and nothing has to be verified to find out that it would pay. ``prior``: whose rates count
    until there are own ones.
    """

    def __init__(self, prior: HitRates | None = None) -> None:
        self._prior = prior
        self._tries = [0.0] * len(_PRIOR)
        self._hits = [0.0] * len(_PRIOR)

    def rate(self, kind: int) -> float:
        """The chance of a token of this kind."""
        prior = _PRIOR[kind] if self._prior is None else self._prior.rate(kind)
        return (self._hits[kind] + _PRIOR_TRIES * prior) / (self._tries[kind] + _PRIOR_TRIES)

    def note(self, kind: int, hit: bool) -> None:
        """It did come, or did not."""
        self._tries[kind] = _KEPT * self._tries[kind] + 1.0
        self._hits[kind] = _KEPT * self._hits[kind] + hit
        if self._prior is not None:
            self._prior.note(kind, hit)


class NgramIndex:
    """Where the n-grams of one growing text occur, and the place that it is copying from.

    A copy is followed as long as it goes on. Where it is left (a word is replaced, left out or put in), it is
    looked for near that place: there a single equal token says much, and none at all may be a token that was
    replaced by one. A longer match elsewhere counts more: the longest of the last 32 occurrences, the latest
    among equals, with up to ``longest`` tokens compared and at least ``shortest`` equal. What a copy puts in
    place of a token is expected where the token comes again, as long as it is replaced more often than not: a
    name that is changed once is changed everywhere.

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
        self._length = 0  # tokens before it that are equal, edits included
        self._is_near = False  # whether it was found near the place where the last copy was left
        self._instead: list[int] = []  # what an edit still puts before the source
        self._left = -1  # the source of the last copy when it was left; -1 = never
        self._left_at = 0  # length of the text then
        self._left_length = 0  # of that copy, and of what it went on from
        self._edits: dict[int, tuple[int, list[int]]] = {}  # by first token: how many go, what comes instead
        self._votes: dict[int, int] = {}  # by first token: above 0 = replaced more often than not
        self._found_at = 0  # length of the text when the source was found
        self._is_new = False  # found near, and what was edited before it is not learnt yet
        self._kinds: list[int] = []  # of the last continuation's tokens

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
        """At most ``limit`` tokens that may follow: those of the source, edited."""
        if self._source < 0:
            self._search()
        draft: list[int] = []
        self._kinds = []
        tokens, count, source, instead = self._tokens, len(self._tokens), self._source, self._instead
        while source >= 0 and len(draft) < limit:
            kind = self._kind(self._length + len(draft))
            if instead:
                token, instead = instead[0], instead[1:]
            elif source - count >= len(draft):
                break
            else:
                # A text that repeats itself goes on repeating: its own continuation follows its end.
                token = tokens[source] if source < count else draft[source - count]
                edit = self._edit_of(token)
                if edit is None:
                    source += 1
                else:
                    kind, token, instead = _EDIT, edit[1][0], edit[1][1:]
                    source += edit[0]
            draft.append(token)
            self._kinds.append(kind)
        return draft

    def chances(self, count: int) -> list[float]:
        """For the first ``count`` tokens of the last continuation, given that those before are right."""
        kinds = self._kinds[:count]
        rates = {kind: self._rates.rate(kind) for kind in set(kinds)}
        return [rates[kind] for kind in kinds]

    def _kind(self, length: int) -> int:
        if self._is_near and length < _NEAR_LENGTHS:
            return length
        return _KIND_OF[min(length, len(_KIND_OF) - 1)]

    def _edit_of(self, token: int) -> tuple[int, list[int]] | None:
        """What the text puts in place of a source's ``token``, if it is likely to."""
        return self._edits[token] if token in self._edits and self._votes[token] > 0 else None

    def _vote(self, token: int, vote: int) -> None:
        votes = self._votes.get(token, 0) + vote
        self._votes[token] = max(-_MOST_VOTES, min(votes, _MOST_VOTES))

    def _follow(self, start: int) -> None:
        """Compare the tokens from ``start`` on with those of the source."""
        tokens = self._tokens
        for at in range(start, len(tokens)):
            said, kind, edit, origin = tokens[at], self._kind(self._length), None, -1
            if self._instead:
                expected = self._instead[0]
            elif self._source >= at:  # an edit went beyond the text
                self._leave(at)
                return
            else:
                expected = origin = tokens[self._source]
                edit = self._edit_of(origin)
                if edit is not None:
                    kind, expected = _EDIT, edit[1][0]
            self._rates.note(kind, said == expected)
            if said != expected and said != origin:
                self._leave(at)
                return
            if self._instead:
                del self._instead[0]
            elif edit is not None and said == expected:
                self._source += edit[0]
                self._instead = edit[1][1:]
                self._vote(origin, _REPLACED)
            else:
                self._source += 1
                self._vote(origin, _COPIED)
            self._length += 1
            if self._is_new and self._length >= _SURE:
                self._learn(at + 1)

    def _leave(self, at: int) -> None:
        """The copy does not go on with the token at ``at``."""
        # Else it was none, and the one before is still looked for.
        copied = self._length + (self._left_length if self._is_near else 0)
        if copied >= _LEAST_COPY and at - self._found_at >= _SURE:
            self._left, self._left_at, self._left_length = self._source, at, copied
        self._source = -1
        self._instead = []

    def _learn(self, count: int) -> None:
        """The copy that was left goes on: remember what stands in place of what."""
        self._is_new = False
        old, new = self._source - self._length, count - self._length
        skipped, instead = old - self._left, self._tokens[self._left_at : new].tolist()
        if 1 <= skipped <= _LONGEST_EDIT and 1 <= len(instead) <= _LONGEST_EDIT:
            first = self._tokens[self._left]
            self._edits[first] = skipped, instead
            self._vote(first, _REPLACED)

    def _search(self) -> None:
        """Find a match of the text's end."""
        tokens, count = self._tokens, len(self._tokens)
        best, best_length = self._near()
        is_near = best >= 0
        at = self._heads[self._slot(count)] if count > self._shortest else -1
        for _ in range(_LONGEST_WALK):
            if at < 0 or at <= count - len(self._earlier):
                break
            length = self._common(at)
            if length >= self._shortest and length > best_length:
                best, best_length, is_near = at, length, False
                if length == self._longest:
                    break
            at = self._earlier[at % len(self._earlier)]
        self._source, self._length, self._is_near, self._is_new = best, best_length, is_near, is_near
        self._found_at = len(tokens)

    def _near(self) -> tuple[int, int]:
        """``(source, length)`` of the longest match near the place where a copy was left; (-1, 0) = none."""
        count, left = len(self._tokens), self._left
        since = count - self._left_at
        if left < 0 or since > _NEAR_FOR:
            return -1, 0
        level = left + since  # as if tokens had been replaced one by one
        best, best_length = (level if since == 1 and level < count else -1), 0
        start, last = max(1, left - _NEAR_BEFORE), self._tokens[-1]
        for at, token in enumerate(self._tokens[start - 1 : min(count, left + _NEAR_AFTER) - 1], start):
            if token == last:
                length = self._common(at)
                if length > best_length or (length == best_length and abs(at - level) < abs(best - level)):
                    best, best_length = at, length
        return best, best_length

    def _common(self, at: int) -> int:
        """Tokens before ``at`` that are those at the text's end."""
        tokens, length, most = self._tokens, 0, min(self._longest, at)
        while length < most and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

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
