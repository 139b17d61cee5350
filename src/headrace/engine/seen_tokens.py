"""Seen tokens: what a sequence has said and been told, as penalties need it."""

from __future__ import annotations

import numpy as np

from headrace.backend.batch import Int32

_GROWTH = 64  # room for so many more ids at first


class SeenTokens:
    """Distinct token ids and how often each occurs in the output; one append a token keeps them current."""

    __slots__ = ("_counts", "_ids", "_index", "_size")

    def __init__(self, prompt: Int32) -> None:
        """``prompt``: ids that count as seen but not as output (pass none where only the output matters)."""
        distinct = np.unique(prompt)
        self._size = len(distinct)
        self._ids = np.empty(self._size + _GROWTH, np.int32)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(len(self._ids), np.int32)
        self._index = {token: i for i, token in enumerate(distinct.tolist())}

    def append(self, token: int) -> None:
        """Count one output token."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self._size
            if at == len(self._ids):
                self._ids = np.resize(self._ids, 2 * at)
                self._counts = np.resize(self._counts, 2 * at)
            self._ids[at] = token
            self._counts[at] = 0
            self._size += 1
        self._counts[at] += 1

    def arrays(self, drafted: list[int] | None = None) -> tuple[Int32, Int32]:
        """``(ids, counts)``, views that are valid until the next append.

        With ``drafted`` tokens: copies, as they would be after those.
        """
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        if not drafted:
            return ids, counts
        new = [token for token in dict.fromkeys(drafted) if token not in self._index]
        places = self._index | {token: self._size + i for i, token in enumerate(new)}
        ids = np.concatenate([ids, np.array(new, np.int32)])
        counts = np.concatenate([counts, np.zeros(len(new), np.int32)])
        np.add.at(counts, [places[token] for token in drafted], 1)
        return ids, counts
