"""How many tokens to draft: as many as pay, for each sequence, at the present load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.config import SpeculativeConfig
from headrace.engine.drafter import Drafter, NgramDrafter
from headrace.engine.kv_cache import KVCache
from headrace.engine.sequence import Rank, Sequence
from headrace.engine.share import Share
from headrace.engine.step_cost import StepCost
from headrace.errors import ConfigError

_KEPT = 0.85  # of what earlier drafts said about acceptance, at each new one
_KEPT_OF_ALL = 0.98  # the same of all sequences' drafts together
_PRIOR_TOKENS, _PRIOR_ACCEPTED = 2.0, 1.2  # what a sequence without drafts is taken for
_LEAST_CHANCE = 0.05  # below which a token is not drafted, however little it seems to cost
_LEAST_GAIN = 0.02  # in tokens a second: chances and costs are estimates
_QUIET_AFTER = 8  # steps without a draft, from which on a look is taken in one step of so many:
_LOOK_EVERY = 3  # or as many as sequences share it
_PROBE_EVERY = 32  # drafts that did not pay, until the next one is tried all the same
_PROBE_TOKENS = 2
_PROBE_SHARE = 0.03  # of the time, at most, that trying again takes
_COUNTED_ON = (
    256  # tokens still to come, at most, that computing a prompt in a draft model is weighed against
)


@dataclass(slots=True)
class Acceptance:
    """How often drafted tokens were accepted, given that the ones before them were.

    Counted where a drafter cannot tell by itself (:meth:`Drafter.chances`).
    """

    tokens: float = _PRIOR_TOKENS
    accepted: float = _PRIOR_ACCEPTED
    skipped: int = 0  # drafts in a row that did not pay

    @property
    def rate(self) -> float:
        """The chance of a drafted token."""
        return self.accepted / self.tokens

    def note(self, drafted: int, accepted: int, kept: float = _KEPT) -> None:
        """A step verified ``drafted`` tokens and accepted the first ``accepted`` of them."""
        self.tokens = kept * self.tokens + min(accepted + 1, drafted)
        self.accepted = kept * self.accepted + accepted
        self.skipped = 0


def best_lengths(
    chances: list[list[float]], cost: StepCost, draft_cost: StepCost | None = None
) -> tuple[list[int], float]:
    """Draft lengths that give a step's sequences the most tokens a second together.

    ``chances``: of each token of each longest draft, given that those before it are right.
    ``cost``: of the step, which takes one token of each in any case. ``draft_cost``: of the small steps that
    make one drafted token each, of all sequences that want it; None: drafts are free. Also returns the
    seconds that drafting saves for each token of the answers.
    """
    count = len(chances)
    if draft_cost is not None and not cost.is_measured:
        return [0] * count, 0.0  # the next step will tell what theirs compare with
    tokens: list[tuple[float, int]] = []  # the chance that all of a draft up to a token is right, and whose
    for index, each in enumerate(chances):
        reached = 1.0
        for chance in each:
            reached *= chance
            if reached < _LEAST_CHANCE:
                break
            tokens.append((reached, index))
    tokens.sort(reverse=True)  # a draft's tokens keep their order: each is less likely than the one before
    lengths, best = [0] * count, [0] * count
    at_length: list[int] = []  # drafts of more tokens than so many
    drafting_s, expected = 0.0, float(count)
    plain_speed = expected / cost.seconds(count)
    best_speed = plain_speed * (1 + _LEAST_GAIN)
    for number, (reached, index) in enumerate(tokens, 1):
        expected += reached
        length, lengths[index] = lengths[index], lengths[index] + 1
        if draft_cost is not None:
            if length == len(at_length):
                at_length.append(0)
            at_length[length] += 1
            drafting_s = sum(draft_cost.line(drafts)[0] for drafts in at_length)
        speed = expected / (cost.seconds(count + number) + drafting_s)
        if speed > best_speed:
            best, best_speed = lengths.copy(), speed
    return best, 1 / plain_speed - 1 / best_speed if any(best) else 0.0


class Speculation:
    """Proposes drafts for sequences that lack only their last token, and learns what became of them."""

    def __init__(
        self,
        config: SpeculativeConfig,
        cost: StepCost,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cost``: what steps take, kept up to date by their owner. ``drafter``: None = prompt lookup.

        Raises ConfigError if a draft model is asked for and there is none.
        """
        if drafter is None and config.method != "ngram":
            raise ConfigError("This engine has no draft model: choose the method 'ngram'.", param="method")
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafted_per_position = [0] * config.num_speculative_tokens
        self.accepted_per_position = [0] * config.num_speculative_tokens
        self.seconds = 0.0  # that drafting took
        self.drafter: Drafter = drafter or NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        self._config = config
        self._acceptance: dict[Rank, Acceptance] = {}
        self._overall = Acceptance()
        self._unverified = 0  # calls in a row of which no draft was verified
        self._quiet: dict[
            Rank, int
        ] = {}  # steps since a sequence had a draft, of those whose drafts are free
        self._forced: set[Rank] = set()  # whose drafts in the step are no guesses
        self._cost = cost
        self._clock = clock

    def draft(
        self, decodes: list[Sequence], share: Share, kv_cache: KVCache, num_running: int, max_model_len: int
    ) -> None:
        """Place drafts behind the tokens of those that decode, and take their rows from ``share``.

        Their tokens are for those to take who decode. ``num_running``: sequences that have blocks.
        """
        room = min(share.spare_rows, share.budget - num_running)
        if room <= 0:
            return
        # Blocks that the others will soon need are not for guesses.
        may_grow = kv_cache.num_available > num_running
        most = [_most_drafted(seq, may_grow, max_model_len) for seq in decodes]
        limits = [min(each, room // len(decodes) or 1) for each in most]
        placed = 0
        for seq, draft in zip(decodes, self.propose(decodes, limits), strict=True):
            if not draft or placed + len(draft) > room:
                continue
            seq.place_draft(draft)
            if seq.num_tokens > seq.num_slots and not (
                kv_cache.num_available > num_running and kv_cache.grow(seq)
            ):
                seq.take_draft()
            placed += seq.num_draft_tokens
        share.spare_rows -= placed

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """For each sequence of a step a draft of at most ``limits[i]`` tokens, fewer where they don't pay."""
        start = self._clock()
        limits = [max(0, min(limit, self._config.num_speculative_tokens)) for limit in limits]
        forced: dict[int, list[int]] = {}
        for index, seq in enumerate(sequences):
            if seq.matcher is not None and (tokens := seq.matcher.forced()):
                # No guess: what the grammar leaves no choice about.
                forced[index], limits[index] = tokens[: limits[index]], 0
        if self.drafter.cost is None:
            drafts = self._looked_up(sequences, limits)
        else:
            lengths = self._lengths(sequences, limits)
            drafts = self._allowed(sequences, self.drafter.propose(sequences, lengths))
        for index, tokens in forced.items():
            drafts[index] = tokens
        self._forced = {sequences[index].rank for index in forced}
        self.seconds += self._clock() - start
        return drafts

    def note_draft(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step verified ``drafted`` tokens of ``seq`` and accepted the first ``accepted`` of them."""
        if self.drafter.cost is not None and seq.rank not in self._forced:
            self._acceptance_of(seq).note(drafted, accepted)
            self._overall.note(drafted, accepted, _KEPT_OF_ALL)
            self._unverified = 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self.drafter.forget(seq)
        self._acceptance.pop(seq.rank, None)
        self._quiet.pop(seq.rank, None)

    def close(self) -> None:
        """Release what the drafter holds. Closing twice is fine."""
        self.drafter.close()

    def _looked_up(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """What a drafter whose drafts are free guesses, as far as it pays to verify.

        Even a look takes its time in steps of a few milliseconds: a sequence that had no draft lately is not
        looked at in every step.
        """
        if not self._config.adaptive:
            return self._allowed(sequences, self.drafter.propose(sequences, limits))
        every = max(_LOOK_EVERY, len(sequences))  # about one look a step, however many they are
        for index, seq in enumerate(sequences):
            quiet = self._quiet[seq.rank] = self._quiet.get(seq.rank, 0) + 1
            if quiet > _QUIET_AFTER and (quiet + index) % every:
                limits[index] = 0
        if not any(limits):
            return [[] for _ in sequences]
        drafts = self._allowed(sequences, self.drafter.propose(sequences, limits))
        if not any(drafts):
            return drafts
        lengths, _ = best_lengths(self._chances(sequences, list(map(len, drafts))), self._cost)
        for seq, length in zip(sequences, lengths, strict=True):
            if length:
                self._quiet[seq.rank] = 0
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def _allowed(self, sequences: list[Sequence], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts as far as the sequences' grammars allow them."""
        return [
            draft if seq.matcher is None else draft[: seq.matcher.num_allowed(draft)]
            for seq, draft in zip(sequences, drafts, strict=True)
        ]

    def _acceptance_of(self, seq: Sequence) -> Acceptance:
        acceptance = self._acceptance.get(seq.rank)
        if acceptance is None:
            # How good a model guesses is more its own affair than the sequence's, and to find that out again
            # for each one would cost the same again.
            acceptance = self._acceptance[seq.rank] = Acceptance()
            acceptance.accepted = self._overall.rate * acceptance.tokens
            acceptance.skipped = self._unverified
        return acceptance

    def _chances(self, sequences: list[Sequence], limits: list[int]) -> list[list[float]]:
        """Of each token of drafts as long as ``limits``: as the drafter says, or as they were accepted."""
        found = []
        for seq, limit in zip(sequences, limits, strict=True):
            known = self.drafter.chances(seq, limit) if limit else []
            found.append([self._acceptance_of(seq).rate] * limit if known is None else known)
        return found

    def _lengths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """What a drafter whose drafts cost time should make: the lengths that pay.

        Where none has paid for long, short ones, to try again.
        """
        if not self._config.adaptive:
            return limits
        acceptances = [self._acceptance_of(seq) for seq in sequences]
        chances = self._chances(sequences, limits)
        lengths, saved_s = best_lengths(chances, self._cost, self.drafter.cost)
        for index, seq in enumerate(sequences):
            if lengths[index] and self.drafter.start_s(seq) > saved_s * _to_come(seq):
                lengths[index] = 0
        self._unverified += 1
        due = []
        for index, acceptance in enumerate(acceptances):
            if limits[index] > 0 and lengths[index] == 0:
                acceptance.skipped += 1
                if acceptance.skipped >= _PROBE_EVERY:
                    due.append(index)
        # They go along with whatever is drafted anyway: a draft model's step costs much the same for one
        # sequence as for all.
        if due and (any(lengths) or self._may_probe([sequences[index] for index in due], limits)):
            for index in due:
                lengths[index] = min(limits[index], _PROBE_TOKENS)
        return lengths

    def _may_probe(self, due: list[Sequence], limits: list[int]) -> bool:
        """Whether it is time to try again for these, of a step with drafts up to ``limits``."""
        if self._unverified < _PROBE_EVERY:
            return False
        draft_cost = self.drafter.cost
        assert draft_cost is not None
        if not any(best_lengths([[1.0] * limit for limit in limits], self._cost, draft_cost)[0]):
            return False  # the best of guesses would not pay
        seconds = _PROBE_TOKENS * draft_cost.line(len(due))[0] + sum(map(self.drafter.start_s, due))
        return seconds <= _PROBE_SHARE * self._unverified * self._cost.line(len(limits))[0]


def _most_drafted(seq: Sequence, may_grow: bool, max_model_len: int) -> int:
    """So many that, all of them accepted and one more sampled, no limit is passed.

    Unless it ``may_grow``, its draft has to fit into the blocks that it has.
    """
    room = max_model_len - seq.num_tokens
    max_tokens = seq.request.params.max_tokens
    if max_tokens is not None:
        room = min(room, max_tokens - seq.num_output_tokens)
    return room - 1 if may_grow else min(room - 1, seq.num_slots - seq.num_tokens)


def _to_come(seq: Sequence) -> int:
    """Tokens that ``seq`` may still have, as far as one can count on them."""
    max_tokens = seq.request.params.max_tokens
    return _COUNTED_ON if max_tokens is None else min(_COUNTED_ON, max_tokens - seq.num_output_tokens)
