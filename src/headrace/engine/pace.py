"""Pace: how much of a step prompts may have, so that those who decode keep their time per output token."""

from __future__ import annotations

from headrace.engine.share import Share
from headrace.engine.step_cost import StepCost

# Prompt tokens of a step that has any: the context is read for one as for all of them, and with the tokens
# that decode beside them they fill the tiles that matrices are multiplied in.
_LEAST = 8
_LEAST_SHARE = 0.2  # of the time that decodes take: so much prompts get, whatever the target
_LOOK_EVERY = 32  # steps with prompt tokens, until one without them shows what decoding costs by itself
_MOST_SAVED = 0.1  # of the target
_MOST_OWED = 4.0  # targets: whatever held a step up, prompts go on some day


class Pace:
    """Sizes steps by a target for the time between a sequence's tokens (TPOT), on average.

    What the decodes of a step leave of ``target_s`` is given to prompts, at the cost that a prompt token has
    shown lately at such a context. Where a step leaves less than the fewest tokens take that are worth doing
    together, it is saved for the next; what a step took too long is owed by the next. So the mean is kept
    even where costs are estimated badly, and only a step of the fewest tokens may pass the target by much.
    Without decodes nobody is kept waiting and there is no bound. A target below 1.2 times what decodes take
    alone is taken for that. The idea is that of Sarathi-Serve (Agrawal et al., OSDI 2024), where each step's
    budget is fixed and profiled beforehand; saving up is deficit round robin (Shreedhar and Varghese, 1995).
    """

    def __init__(self, cost: StepCost, target_s: float | None) -> None:
        self._cost = cost
        self._target_s = target_s
        self._since_look = 0
        self._saved_s = 0.0  # by earlier steps; below 0 = owed

    def limit(self, share: Share, context: int) -> None:
        """Leave of ``share``, which has given its part to decodes, what prompts may have.

        ``context``: tokens before the first that they would get.
        """
        if self._target_s is None or share.decode_tokens == 0:
            return
        self._since_look += 1
        if self._since_look > _LOOK_EVERY:
            share.budget = 0
            return
        each_s = self._cost.prompt_token_s_at(context)
        fit = _LEAST
        if each_s > 0.0:
            decodes_s = self._cost.line(share.decode_tokens)[0]
            target_s = self._target(decodes_s)
            self._saved_s = min(self._saved_s, max(_LEAST * each_s, _MOST_SAVED * target_s))
            fit = int((target_s - decodes_s - share.drafting_s + self._saved_s) / each_s)
        share.budget = min(share.budget, fit) if fit >= _LEAST else 0

    def note(self, share: Share, seconds: float) -> None:
        """A step that gave what ``share`` says took so long, without the drafting for it."""
        if not share.prompt_tokens:
            self._since_look = 0
        tokens = share.decode_tokens
        self._cost.note(
            tokens, seconds, prompt_tokens=share.prompt_tokens, context_tokens=share.context_tokens
        )
        if self._target_s is not None and tokens:
            target_s = self._target(self._cost.line(tokens)[0])
            saved_s = self._saved_s + target_s - seconds - share.drafting_s
            self._saved_s = max(saved_s, -_MOST_OWED * target_s)

    def _target(self, decodes_s: float) -> float:
        assert self._target_s is not None
        return max(self._target_s, (1 + _LEAST_SHARE) * decodes_s)
