"""Pace: how much of a step prompts may have, so that those who decode keep their time per output token."""

from __future__ import annotations

from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.step_cost import StepCost

_LEAST = BLOCK_SIZE  # prompt tokens of a step, whatever the target: every prompt is computed some day
_LOOK_EVERY = 32  # steps with prompt tokens, until one without them shows what decoding costs by itself


class Pace:
    """Sizes steps by a target for the time between a sequence's tokens (TPOT).

    A step may take ``target_s``. What the decodes in it leave of that time is given to prompts, at the cost
    that a prompt token has shown lately. Without decodes nobody is kept waiting and there is no bound. The
    idea is that of Sarathi-Serve (Agrawal et al., OSDI 2024); the budget there is profiled beforehand.
    """

    def __init__(self, cost: StepCost, target_s: float | None) -> None:
        self._cost = cost
        self._target_s = target_s
        self._since_look = 0

    def prompt_tokens(self, decode_tokens: int, most: int) -> int:
        """Prompt tokens, up to ``most``, that go with so many decoded and drafted ones in the next step."""
        if self._target_s is None or decode_tokens == 0:
            return most
        self._since_look += 1
        if self._since_look > _LOOK_EVERY:
            return 0
        left = self._target_s - self._cost.line(decode_tokens)[0]
        each = self._cost.prompt_token_s
        fit = int(left / each) if left > 0 and each > 0 else 0
        return min(most, max(_LEAST, fit // BLOCK_SIZE * BLOCK_SIZE))

    def note(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoded and drafted tokens, and so many of prompts, took so long."""
        if not prompt_tokens:
            self._since_look = 0
        self._cost.note(tokens, seconds, prompt_tokens=prompt_tokens)
