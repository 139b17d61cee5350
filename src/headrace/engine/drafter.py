"""Drafters: who guesses the tokens that come next, for the model to verify."""

from __future__ import annotations

from array import array
from typing import Protocol

from headrace.engine.sequence import Rank, Sequence

_WINDOW = 2**15  # positions that are remembered of one sequence
_LONGEST_WALK = 32  # earlier occurrences that are compared
_HASH_FACTOR = 0x9E3779B1


class Drafter(Protocol):
    """Guesses continuations. Guesses are never trusted: a bad one costs time and changes nothing."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence at most ``limits[i]`` tokens that may follow those it has; none is fine.

        What became of a draft shows in the sequence's tokens at the next call: they only ever grow.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended; one that was never seen is fine."""
        ...


class NgramDrafter:
    """Prompt lookup: what followed the last tokens when they occurred before, in prompt or output.

    The longest match wins, up to ``longest`` tokens, the latest one among equals; below ``shortest`` there
    is no draft. Source: Saxena, "Prompt Lookup Decoding", 2023; the index is that of LZ77 coders.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[Rank, NgramIndex] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """See :meth:`Drafter.propose`."""
        drafts = []
        for seq, limit in zip(sequences, limits, strict=True):
            index = self._indexes.get(seq.rank)
            if index is None:
                index = self._indexes[seq.rank] = NgramIndex(self._shortest, self._longest)
            index.extend(seq.tokens(len(index), seq.num_tokens).tolist())
            drafts.append(index.continuation(limit))
        return drafts

    def forget(self, seq: Sequence) -> None:
        """See :meth:`Drafter.forget`."""
        self._indexes.pop(seq.rank, None)


class NgramIndex:
    """Where the n-grams of one growing text occur.

    Positions whose ``shortest`` tokens have one hash are chained, the latest first, over the last 32768
    positions: constant time for a token, 4 bytes for it, and at most 256 KiB for the chains.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("i")
        self._heads = array("i")  # latest position of each hash; -1 = none
        self._earlier = array("i")  # by position modulo its length: the one before with the same hash

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that follow."""
        start = len(self._tokens)
        self._tokens.extend(token_ids)
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
        tokens, count = self._tokens, len(self._tokens)
        if limit <= 0 or count <= self._shortest:
            return []
        best, best_length = -1, self._shortest - 1
        at = self._heads[self._slot(count)]
        for _ in range(_LONGEST_WALK):
            if at < 0 or at <= count - len(self._earlier):
                break
            length = 0
            while length < self._longest and length < at and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = at, length
                if length == self._longest:
                    break
            at = self._earlier[at % len(self._earlier)]
        if best < 0:
            return []
        draft = tokens[best : best + limit].tolist()
        period = count - best  # a text that repeats itself goes on repeating
        while len(draft) < limit:
            draft.append(draft[len(draft) - period])
        return draft

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
