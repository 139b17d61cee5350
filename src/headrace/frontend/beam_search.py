"""Beam search: the likeliest whole answers instead of sampled ones.

Every beam's next step is a request of its own; the prefix cache makes beams share the blocks of their common
past. The rules are those of transformers' ``generate(num_beams=…)``, so that answers are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.engine.request import SamplingParams
from headrace.engine.validate import MAX_LOGPROBS
from headrace.errors import InvalidRequestError
from headrace.frontend.detokenizer import Detokenizer
from headrace.frontend.tokenizer import Tokenizer

MAX_BEAMS = MAX_LOGPROBS // 2
"""Each beam is continued by twice as many tokens as there are beams, one of which may end it."""


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """How beams are searched.

    A beam's score is its log-probability divided by ``length ** length_penalty``, the output's length:
    above 0 favours long answers, below 0 short ones. ``early_stopping``: True ends as soon as ``beam_width``
    beams have ended; False when no running one looks better at its present length; "never" when none can
    become better.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise InvalidRequestError naming the first field that is wrong and what would be right."""
        SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos).validate()
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAMS:
            raise InvalidRequestError(
                f"beam_width must be a whole number from 1 to {MAX_BEAMS}, not {self.beam_width!r:.40}.",
                param="beam_width",
            )
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not -10 <= penalty <= 10:
            raise InvalidRequestError(
                f"length_penalty must be a number from -10 to 10, not {penalty!r:.40}.",
                param="length_penalty",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r:.40}.',
                param="early_stopping",
            )


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or its beginning. ``score`` is final once it has ended; ``stopped``: by an end token."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    score: float = 0.0
    stopped: bool = False


class BeamSearch:
    """One prompt's beams. Compute ``running`` with ``step_params``, :meth:`advance`, until ``done``."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], room: int) -> None:
        """``room``: tokens that the context has left for the answer."""
        self.running = [Beam()]
        self.ended: list[Beam] = []  # the best, best first
        self.done = False
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._max_tokens = min(params.max_tokens, room)
        # So many that enough remain to go on with if every beam could end.
        self._candidates = min(MAX_LOGPROBS, max(2, 1 + len(self._ends)) * params.beam_width)
        self._improvable = True

    @property
    def step_params(self) -> SamplingParams:
        """What to ask of each running beam: its likeliest next tokens."""
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=self._candidates, ignore_eos=True)

    def advance(self, likeliest: Sequence[Iterable[tuple[int, float]]]) -> None:
        """Go on by one token. ``likeliest``: each running beam's next tokens and their log-probabilities."""
        params, width = self._params, self._params.beam_width
        extended = [
            (beam.logprob + logprob, number, token)
            for number, (beam, top) in enumerate(zip(self.running, likeliest, strict=True))
            for token, logprob in top
        ]
        extended.sort(key=lambda entry: (-entry[0], entry[1:]))
        length = len(self.running[0].token_ids) + 1
        divisor = length**params.length_penalty
        at_end = length >= self._max_tokens
        full = len(self.ended) == width
        running, ended = [], []
        for rank, (logprob, number, token) in enumerate(extended[: self._candidates]):
            stopped = token in self._ends
            beam = Beam((*self.running[number].token_ids, token), logprob, logprob / divisor, stopped)
            if not (stopped or at_end):
                running.append(beam)
            elif rank < width and self._improvable and not (full and params.early_stopping is True):
                ended.append(beam)  # one beyond the best is only there to go on with
        self.running = running[:width]
        self.ended = sorted(self.ended + ended, key=lambda beam: -beam.score)[:width]
        full = len(self.ended) == width
        if full and self.running:
            longest = params.early_stopping == "never" and params.length_penalty > 0
            hoped = (self._max_tokens if longest else length) ** params.length_penalty
            self._improvable = self.running[0].logprob / hoped > self.ended[-1].score
        self.done = not self.running or not self._improvable or (full and params.early_stopping is True)


def beam_text(beam: Beam, tokenizer: Tokenizer, prompt_token_ids: Collection[int]) -> str:
    """The text of an answer, without the token that ended it."""
    special = tokenizer.special_token_ids
    continues_text = any(token not in special for token in prompt_token_ids)
    detokenizer = Detokenizer(tokenizer, continues_text=continues_text)
    shown = beam.token_ids[:-1] if beam.stopped else beam.token_ids
    return detokenizer.push(shown) + detokenizer.finish()
