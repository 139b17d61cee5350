"""Outcome: what one step's result says about one sequence."""

from __future__ import annotations

import math

import msgspec

from headrace.backend.batch import StepResult
from headrace.engine.request import TokenLogprobs
from headrace.engine.sequence import Sequence

NOT_FINITE = "The model produced numbers that are not finite; this sequence cannot go on."
_NOTHING_LEFT = (
    "The model produced numbers that are not finite, or none for what the grammar and min_tokens allow; this "
    "sequence cannot go on."
)


class Outcome(msgspec.Struct, gc=False):
    """What a sequence got of a step: so many tokens, of which ``drafted`` and ``accepted`` were guessed."""

    num_tokens: int
    finish_reason: str | None
    failed: bool
    drafted: int
    accepted: int


class StepOutcomes:
    """Reads a result sequence by sequence, in the order of its batch."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self._sampled: list[int] = result.token_ids.tolist()
        self._failed: list[bool] = result.failed.tolist()
        self._next = 0  # first logit row of the next sequence

    def take(self, seq: Sequence) -> Outcome:
        """Extend ``seq`` by what was sampled for it; it is to be told.

        A drafted token counts exactly when it is the one that was sampled in its place. The first one that
        was not, and all that was computed after it, is forgotten: other tokens will take its slots.
        """
        draft = seq.take_draft() if seq.num_draft_tokens else ()
        seq.num_computed_tokens += seq.num_scheduled
        row, end = self._next, self._next + seq.num_logit_rows
        self._next = end
        sound = True
        if seq.prompt_logprobs is not None and seq.lacks_prompt_logprobs:
            row, sound = self._take_prompt_logprobs(seq, row)
        count, accepted, reason, failed = 0, 0, None, False
        for at in range(row, end):
            if self._failed[at] or not sound:
                failed = True
                break
            token = self._sampled[at]
            reason = seq.take(token)
            is_right = count < len(draft) and token == draft[count]
            count += 1
            accepted += is_right
            if reason is not None or not is_right:
                break
        if draft:
            seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)
        if seq.num_logprobs is not None and count:
            found = self._logprobs(seq.num_logprobs, row, count)
            seq.untold_logprobs = found if seq.untold_logprobs is None else seq.untold_logprobs + found
        return Outcome(count, reason, failed, end - row - 1 if draft else 0, accepted)

    def take_vector(self, seq: Sequence) -> bytes | None:
        """An encoder's vector of ``seq``, float32 and little-endian; None when it is not finite."""
        row, self._next = self._next, self._next + 1
        vectors = self._result.vectors
        assert vectors is not None
        return None if self._failed[row] else vectors[row].astype("<f4", copy=False).tobytes()

    def _take_prompt_logprobs(self, seq: Sequence, row: int) -> tuple[int, bool]:
        """The row after those of prompt tokens that the step scored, and whether all of them are sound."""
        have = seq.prompt_logprobs
        assert have is not None
        end = row + min(seq.num_logit_rows, seq.num_prompt_tokens - 1 - len(have))
        have += [self._scored(seq, at, len(have) + 1 + at - row) for at in range(row, end)]
        return end, True not in self._failed[row:end]

    def _scored(self, seq: Sequence, row: int, position: int) -> TokenLogprobs:
        """The log-probabilities of the prompt's token at ``position``."""
        result, wanted = self._result, seq.request.params.prompt_logprobs
        [token] = seq.tokens(position, position + 1).tolist()
        impossible = token != self._sampled[row]  # so much so that no bias helped
        return TokenLogprobs(
            token_id=token,
            logprob=-math.inf if impossible else float(result.logprobs[row]),
            top_ids=result.top_ids[row, :wanted].tolist(),
            top_logprobs=result.top_logprobs[row, :wanted].tolist(),
        )

    def _logprobs(self, wanted: int, row: int, count: int) -> list[TokenLogprobs]:
        result = self._result
        return [
            TokenLogprobs(
                token_id=self._sampled[at],
                logprob=float(result.logprobs[at]),
                top_ids=result.top_ids[at, :wanted].tolist(),
                top_logprobs=result.top_logprobs[at, :wanted].tolist(),
            )
            for at in range(row, row + count)
        ]


def why_failed(seq: Sequence) -> tuple[str, str]:
    """Class and message of the error of a row that could not be sampled: its grammar's, or its logits'."""
    if seq.matcher is None:
        return "GenerationError", NOT_FINITE
    why = seq.matcher.dead_end()
    return ("GenerationError", _NOTHING_LEFT) if why is None else ("GrammarError", why)
