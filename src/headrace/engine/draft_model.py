"""DraftModel: a smaller model of the same vocabulary guesses what the larger one will say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.backend.batch import BLOCK_SIZE, StepResult
from headrace.backend.runner import Runner, RunnerSettings
from headrace.engine.assemble import Assembler
from headrace.engine.kv_cache import KVCache
from headrace.engine.request import EngineRequest, SamplingParams
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Rank, Request, Sequence
from headrace.engine.step_cost import StepCost

_RETRY_AFTER = 16  # calls, for a sequence that found no room
_WARM_UP_TOKENS = 4 * BLOCK_SIZE


@dataclass(slots=True)
class _Shadow:
    """A sequence as the draft model has it. Its drafted tokens are those that nobody has judged yet."""

    target: Sequence
    own: Sequence  # tokens, row and blocks in the draft model's cache
    asked_at: int  # the last call that wanted a draft
    limit: int = 0  # of that draft
    is_caught_up: bool = False  # has been, once

    @property
    def draft(self) -> list[int]:
        """What it guesses."""
        drafted: list[int] = self.own.tokens(self.own.num_known_tokens, self.own.num_tokens).tolist()
        return drafted


class DraftModel:
    """A Drafter with a runner and KV blocks of its own. Drafts are greedy.

    A call takes at most as many small steps as the longest draft has tokens, each for all sequences that want
    one more. The first also computes what has been sampled since. A sequence that the draft model has not
    seen yet, or long not drafted for, has more to catch up with than fits into one step: it gets no draft
    until it has, and no step of catching up takes longer than the drafting that it is for.

    Where blocks are short, or a context is longer than this model's, or holds ids that it does not have,
    there is no draft. What a rejected draft has left in the cache is computed anew, and only blocks of tokens
    that were sampled become findable by other sequences.
    Source of the method: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative
    Decoding", 2023; how drafts are judged is the scheduler's affair.
    """

    def __init__(
        self,
        runner: Runner,
        settings: RunnerSettings,
        *,
        vocab_size: int,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``settings``: those the runner was opened with. ``vocab_size``: of the model that verifies."""
        architecture = runner.architecture
        self.cost = StepCost()
        self.max_model_len = min(settings.max_model_len, settings.num_blocks * BLOCK_SIZE)
        self.kv_cache = KVCache(
            num_blocks=settings.num_blocks,
            num_groups=len(architecture.kv_groups),
            max_sequences=settings.max_sequences,
            max_model_len=self.max_model_len,
            prefix_caching=prefix_caching,
        )
        self._runner = runner
        self._vocab_size = vocab_size
        self._own_vocab_size = architecture.vocab_size
        self._max_batch_tokens = settings.max_batch_tokens
        self._rows = SamplingRows(settings.max_sequences, architecture.vocab_size)
        self._assembler = Assembler(self.kv_cache, self._rows)
        self._free_rows = list(range(settings.max_sequences - 1, -1, -1))
        self._shadows: dict[Rank, _Shadow] = {}  # of sequences with blocks here
        self._refused: dict[Rank, int] = {}  # the call at which there was no room
        self._num_calls = 0
        self._clock = clock
        self._warm_up()

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """See :meth:`Drafter.propose`."""
        self._num_calls += 1
        wanting = [(seq, limit) for seq, limit in zip(sequences, limits, strict=True) if limit > 0]
        for seq, _ in wanting:
            if (shadow := self._shadows.get(seq.rank)) is not None:
                shadow.asked_at = self._num_calls
        self._leave_unwanted()
        asked: dict[Rank, _Shadow] = {}
        for seq, limit in wanting:
            shadow = self._follow(seq)
            if shadow is not None:
                # The last token of a draft is not computed.
                shadow.limit = min(limit, self.max_model_len - seq.num_tokens + 1)
                asked[seq.rank] = shadow
        self._draft(list(asked.values()))
        return [asked[seq.rank].draft if seq.rank in asked else [] for seq in sequences]

    def chances(self, seq: Sequence, count: int) -> None:
        """See :meth:`Drafter.chances`: what it thinks of its own guesses is not looked at."""
        return None

    def start_s(self, seq: Sequence) -> float:
        """See :meth:`Drafter.start_s`."""
        shadow = self._shadows.get(seq.rank)
        computed = 0 if shadow is None else min(shadow.own.num_computed_tokens, shadow.own.num_known_tokens)
        lacking = seq.num_tokens - computed
        return lacking * self.cost.prompt_token_s if lacking > BLOCK_SIZE else 0.0

    def forget(self, seq: Sequence) -> None:
        """See :meth:`Drafter.forget`. Its blocks stay findable: the next turn of a chat begins with them."""
        self._refused.pop(seq.rank, None)
        if (shadow := self._shadows.get(seq.rank)) is not None:
            self._leave(shadow)

    def close(self) -> None:
        """See :meth:`Drafter.close`."""
        self._runner.close()

    # Sequences come and go

    def _leave_unwanted(self) -> None:
        """Give up those that were preempted, and those that stopped half-way: others may wait for them."""
        for shadow in list(self._shadows.values()):
            stopped = shadow.asked_at != self._num_calls and not shadow.is_caught_up
            if shadow.target.row < 0 or (stopped and self.kv_cache.prefix_caching):
                self._leave(shadow)

    def _follow(self, seq: Sequence) -> _Shadow | None:
        """What the draft model has of ``seq``, brought up to date; None where it can have nothing."""
        shadow = self._shadows.get(seq.rank)
        if shadow is None:
            if self._num_calls - self._refused.get(seq.rank, -_RETRY_AFTER) < _RETRY_AFTER:
                return None
            return self._enter(seq)
        if self._take_in(shadow) and self.kv_cache.grow(shadow.own):
            return shadow
        self._leave(shadow)  # its blocks are of more use to others
        self._refused[seq.rank] = self._num_calls
        return None

    def _enter(self, seq: Sequence) -> _Shadow | None:
        known = seq.tokens(0, seq.num_tokens)
        self._refused[seq.rank] = self._num_calls
        if seq.num_tokens > self.max_model_len or int(known.max()) >= self._own_vocab_size:
            return None
        own = _sequence(known.tolist(), seq.request.cache_salt)
        prefix = self.kv_cache.find_prefix(own)
        if prefix is None:  # another sequence is computing what it needs, and will soon have done so
            del self._refused[seq.rank]
            return None
        own.row = self._free_rows[-1]
        while not self.kv_cache.admit(own, prefix, headroom=len(self._shadows)):
            idle = [shadow for shadow in self._shadows.values() if shadow.asked_at != self._num_calls]
            if not idle:
                return None
            self._leave(min(idle, key=lambda shadow: shadow.asked_at))
        self._free_rows.remove(own.row)
        del self._refused[seq.rank]
        self._rows.fill(own)
        shadow = self._shadows[seq.rank] = _Shadow(seq, own, asked_at=self._num_calls)
        return shadow

    def _take_in(self, shadow: _Shadow) -> bool:
        """Take in what was sampled, and keep of the draft what was right. False: it can follow no more."""
        own, target = shadow.own, shadow.target
        known = own.num_known_tokens
        draft = own.take_draft()
        new: list[int] = target.tokens(known, target.num_tokens).tolist()
        right = 0
        while right < min(len(draft), len(new)) and draft[right] == new[right]:
            right += 1
        own.num_computed_tokens = min(own.num_computed_tokens, known + right, target.num_tokens - 1)
        if target.num_tokens > self.max_model_len or max(new, default=0) >= self._own_vocab_size:
            return False
        for token in new:
            own.append(token)
        self.kv_cache.commit(own)
        return True

    def _leave(self, shadow: _Shadow) -> None:
        """Give its blocks back; those that are full stay findable until others need them."""
        self._take_in(shadow)
        self.kv_cache.release(shadow.own)
        self._free_rows.append(shadow.own.row)
        shadow.own.row = -1
        del self._shadows[shadow.target.rank]

    # Steps

    def _draft(self, shadows: list[_Shadow]) -> None:
        """Extend each shadow by its draft, a token a step."""
        self._give_first(shadows)
        while shadows:
            sampled = self._step([shadow.own for shadow in shadows])
            tokens = zip(sampled.token_ids.tolist(), sampled.failed.tolist(), strict=True)
            longer = []
            for shadow in shadows:
                own = shadow.own
                own.num_computed_tokens += own.num_scheduled
                if own.num_logit_rows == 0:
                    continue
                token, failed = next(tokens)
                shadow.is_caught_up = True
                if failed or token >= self._vocab_size:
                    continue
                draft = [*own.take_draft(), token]
                own.place_draft(draft)
                if len(draft) < shadow.limit and self.kv_cache.grow(own):
                    own.num_scheduled = own.num_logit_rows = 1
                    longer.append(shadow)
            shadows = longer

    def _give_first(self, shadows: list[_Shadow]) -> None:
        """Schedule what each one lacks in the first step, as far as it goes: those that lack least first."""
        if not shadows:
            return
        most = self._catch_up_tokens(len(shadows), max(shadow.limit for shadow in shadows))
        spare = min(max(most, len(shadows)), self._max_batch_tokens - len(shadows))
        for shadow in sorted(shadows, key=lambda shadow: shadow.own.num_lacking):
            own = shadow.own
            own.num_scheduled = min(own.num_lacking, 1 + spare)
            own.num_logit_rows = int(own.num_scheduled == own.num_lacking)
            spare -= own.num_scheduled - 1

    def _catch_up_tokens(self, sequences: int, steps: int) -> int:
        """Tokens that take as long as so many small steps."""
        each = self.cost.prompt_token_s
        if each == 0.0:
            return _WARM_UP_TOKENS
        return max(BLOCK_SIZE, int(steps * self.cost.line(sequences)[0] / each))

    def _step(self, scheduled: list[Sequence]) -> StepResult:
        batch = self._assembler.batch(scheduled)
        start = self._clock()
        result = self._runner.run(batch)
        seconds = self._clock() - start
        tokens = len(batch.token_ids)
        beyond = tokens - len(scheduled)
        if beyond > len(scheduled):
            self.cost.note(len(scheduled), seconds, prompt_tokens=beyond)
        else:
            self.cost.note(tokens, seconds)
        return result

    def _warm_up(self) -> None:
        """Learn what steps cost before the first draft has to be worth it."""
        count = min(_WARM_UP_TOKENS, self.max_model_len, self._max_batch_tokens)
        own = _sequence([0] * count, "")
        own.row = self._free_rows[-1]
        self._rows.fill(own)
        self.kv_cache.admit(own, [])
        for number, tokens in enumerate((count, 1, 1, 1, count)):
            own.num_computed_tokens = count - tokens
            own.num_scheduled, own.num_logit_rows = tokens, 1
            if number == 0:  # memory is touched for the first time
                self._runner.run(self._assembler.batch([own]))
            else:
                self._step([own])
        self.kv_cache.release(own)


def _sequence(token_ids: list[int], cache_salt: str) -> Sequence:
    """A sequence that knows these tokens and samples greedily."""
    request = EngineRequest(
        request_id="",
        prompt_token_ids=token_ids,
        params=SamplingParams(temperature=0.0),
        cache_salt=cache_salt,
    )
    return Request(request, number=0, seed=0, now=0.0, vocab_size=0).sequences[0]
