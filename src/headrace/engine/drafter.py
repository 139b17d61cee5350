"""Drafters: who guesses the tokens that come next, for the model to verify."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.ngram_index import HitRates, NgramIndex
from headrace.engine.sequence import Rank, Sequence
from headrace.engine.step_cost import StepCost


class Drafter(Protocol):
    """Guesses continuations. Guesses are never trusted: a bad one costs time and changes nothing."""

    @property
    def cost(self) -> StepCost | None:
        """What its steps take, each of which makes a token of every draft; None: nothing."""
        ...

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence at most ``limits[i]`` tokens that may follow those it has; none is fine.

        What became of a draft shows in the sequence's tokens at the next call: they only ever grow.
        """
        ...

    def chances(self, seq: Sequence, count: int) -> list[float] | None:
        """For each of the first ``count`` tokens of the draft for ``seq``, given that those before are right.

        None: it cannot tell, and what became of earlier drafts has to.
        """
        ...

    def start_s(self, seq: Sequence) -> float:
        """Seconds of work before it can guess for ``seq``, beyond a usual step."""
        ...

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended; one that was never seen is fine."""
        ...

    def close(self) -> None:
        """Release what it holds. Closing twice is fine."""
        ...


class NgramDrafter:
    """Prompt lookup: what followed the last tokens when they occurred before, in prompt or output.

    What a match is, and which one counts, says :class:`NgramIndex`. How far it can be trusted follows from
    how long it is and how often matches of that length were right in this sequence, and in others at first.
    Sources: Saxena, "Prompt Lookup Decoding", 2023; chances by match length and measured frequencies as in
    SuffixDecoding (Oliaro et al., 2024); the index is that of LZ77 coders.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._rates = HitRates()
        self._indexes: dict[Rank, NgramIndex] = {}

    @property
    def cost(self) -> None:
        """Nothing worth counting."""
        return None

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """See :meth:`Drafter.propose`."""
        drafts: list[list[int]] = []
        for seq, limit in zip(sequences, limits, strict=True):
            if limit <= 0:
                drafts.append([])
                continue
            index = self._indexes.get(seq.rank)
            if index is None:
                index = self._indexes[seq.rank] = NgramIndex(self._shortest, self._longest, self._rates)
            index.extend(seq.tokens(len(index), seq.num_tokens).tolist())
            drafts.append(index.continuation(limit))
        return drafts

    def chances(self, seq: Sequence, count: int) -> list[float]:
        """See :meth:`Drafter.chances`."""
        return self._indexes[seq.rank].chances(count)

    def start_s(self, seq: Sequence) -> float:
        """See :meth:`Drafter.start_s`."""
        return 0.0

    def forget(self, seq: Sequence) -> None:
        """See :meth:`Drafter.forget`."""
        self._indexes.pop(seq.rank, None)

    def close(self) -> None:
        """Nothing to release."""
