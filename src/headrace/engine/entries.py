"""Entries: what the sequences that get blocks had to compute, and what they found."""

from __future__ import annotations

from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.sequence import Sequence
from headrace.engine.waiting import WaitingLine


class Entries:
    """Counts since the start. A sequence enters when it gets blocks, and again after each preemption."""

    def __init__(self, *, prefix_caching: bool) -> None:
        self.prompt_tokens = 0  # of all that have entered, computed or found
        self.prefix_queries = 0  # prompt tokens that were looked for
        self.prefix_hits = 0
        self.swapped = 0  # came back after preemption with blocks of the second tier
        self.recomputed = 0  # came back with more than a block to compute, and none from there
        self._prefix_caching = prefix_caching

    def begin(self, seq: Sequence, waiting: WaitingLine, now: float) -> None:
        """``seq`` leaves the waiting line, maybe not for the first time; some of it may still be loading."""
        if seq.first_scheduled_time is not None:
            waiting.admitted(seq, 0, now)
            return
        seq.first_scheduled_time = now
        waiting.admitted(seq, seq.num_lacking - seq.num_loading, now)
        if not seq.request.was_scheduled:
            seq.request.was_scheduled = True
            self.prompt_tokens += seq.num_prompt_tokens

    def found(self, seq: Sequence) -> None:
        """``seq`` has all of it that either tier had, and begins to compute the rest."""
        if seq.is_new:
            seq.is_new = False
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            if self._prefix_caching:
                self.prefix_queries += seq.num_prompt_tokens
                self.prefix_hits += seq.num_cached_tokens
        elif seq.num_loaded:
            self.swapped += 1
        elif seq.num_lacking > BLOCK_SIZE:
            self.recomputed += 1
