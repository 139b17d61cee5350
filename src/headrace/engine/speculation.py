"""How many tokens to draft: as many as pay, for each sequence, at the present load."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.config import SpeculativeConfig
from headrace.engine.drafter import Drafter, NgramDrafter
from headrace.engine.sequence import Rank, Sequence
from headrace.engine.step_cost import StepCost

_KEPT = 0.85  # of what earlier drafts said about acceptance, at each new one
_PRIOR_TOKENS, _PRIOR_ACCEPTED = 2.0, 1.2  # what a sequence without drafts is taken for
_PROBE_EVERY = 32  # drafts that did not pay, until the next one is tried all the same
_PROBE_TOKENS = 2


@dataclass(slots=True)
class Acceptance:
    """How often a sequence's drafted tokens were accepted, given that the ones before them were."""

    tokens: float = _PRIOR_TOKENS
    accepted: float = _PRIOR_ACCEPTED
    skipped: int = 0  # drafts in a row that did not pay

    def note(self, drafted: int, accepted: int) -> None:
        """A step verified ``drafted`` tokens and accepted the first ``accepted`` of them."""
        self.tokens = _KEPT * self.tokens + min(accepted + 1, drafted)
        self.accepted = _KEPT * self.accepted + accepted
        self.skipped = 0

    def best_length(self, limit: int, sequences: int, cost: StepCost) -> int:
        """The draft length, up to ``limit``, that gives the most tokens a second.

        ``sequences``: how many others and itself take one token in the step in any case.
        """
        step_s, token_s = cost.line(sequences)
        rate, chance = self.accepted / self.tokens, 1.0
        expected, best, best_speed = float(sequences), 0, sequences / step_s
        for length in range(1, limit + 1):
            chance *= rate
            expected += chance
            speed = expected / (step_s + length * token_s)
            if speed <= best_speed:
                break
            best, best_speed = length, speed
        return best


class Speculation:
    """Proposes drafts for sequences that lack only their last token, and learns what became of them."""

    def __init__(self, config: SpeculativeConfig, cost: StepCost) -> None:
        """``cost``: what steps take, kept up to date by their owner."""
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafted_per_position = [0] * config.num_speculative_tokens
        self.accepted_per_position = [0] * config.num_speculative_tokens
        self._config = config
        self._drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        self._acceptance: dict[Rank, Acceptance] = {}
        self._cost = cost

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence of a step a draft of at most ``limits[i]`` tokens, fewer where they don't pay."""
        most = self._config.num_speculative_tokens
        drafts = self._drafter.propose(sequences, [min(limit, most) for limit in limits])
        for index, (seq, limit) in enumerate(zip(sequences, limits, strict=True)):
            if seq.matcher is not None:
                if forced := seq.matcher.forced():  # no guess: what the grammar leaves no choice about
                    drafts[index] = forced[: max(0, min(limit, most))]
                    continue
                del drafts[index][seq.matcher.num_allowed(drafts[index]) :]
            if self._config.adaptive and drafts[index]:
                del drafts[index][self._length(seq, len(drafts[index]), len(sequences)) :]
        return drafts

    def note_draft(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step verified ``drafted`` tokens of ``seq`` and accepted the first ``accepted`` of them."""
        self._acceptance.setdefault(seq.rank, Acceptance()).note(drafted, accepted)
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._drafter.forget(seq)
        self._acceptance.pop(seq.rank, None)

    def _length(self, seq: Sequence, limit: int, sequences: int) -> int:
        acceptance = self._acceptance.setdefault(seq.rank, Acceptance())
        length = acceptance.best_length(limit, sequences, self._cost)
        if length == 0:
            acceptance.skipped += 1
            if acceptance.skipped >= _PROBE_EVERY:
                acceptance.skipped = 0
                return min(limit, _PROBE_TOKENS)
        return length
