"""What a step costs: learned from steps as they are timed, for all who have to decide before the next one."""

from __future__ import annotations

_KEPT = 0.97  # of what earlier steps of decodes said, at each new one
_PRIOR_SHARE = 0.2  # of a step's time that one more token costs, until steps of several sizes were seen
_PRIOR_WEIGHT = 4.0

_LEAST_S = 1e-9  # no step takes no time, whatever a coarse clock says

_PROMPT_KEPT = 0.9  # the same of steps with prompt tokens, whose cost moves with the contexts they attend to
_LEAST_SHARE = (
    0.05  # of such a step's time that is taken for its prompt tokens', however the rest is estimated
)
_ENOUGH = 2.5  # steps of each kind, older ones fading, before predictions are offered


class StepCost:
    """Seconds of a step, in two parts that are measured apart.

    A few decoded or drafted tokens: a line, fitted to steps that had nothing else, older ones fading. There a
    step mostly reads weights, and one token more is cheap. Prompt tokens: what a step with them took beyond
    that line, for each. There every token computes.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # weighted means
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._prompt_weight = 0.0
        self._prompt_tokens = 0.0  # weighted sums
        self._prompt_seconds = 0.0

    def note(self, tokens: int, seconds: float, *, prompt_tokens: int = 0) -> None:
        """A step of so many decoded and drafted tokens, and so many of prompts, took so long."""
        seconds = max(seconds, _LEAST_S)
        if prompt_tokens:
            self._note_prompt(tokens, prompt_tokens, seconds)
            return
        if self._weight:
            seconds = min(seconds, 4 * self._seconds)  # the machine did something else meanwhile
        self._weight = _KEPT * self._weight + 1.0
        share = 1.0 / self._weight
        off, late = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off
        self._seconds += share * late
        self._variance = (1 - share) * (self._variance + share * off * off)
        self._covariance = (1 - share) * (self._covariance + share * off * late)

    @property
    def is_known(self) -> bool:
        """Whether enough steps of both kinds were seen to predict seconds."""
        return self._weight >= _ENOUGH and self._prompt_weight >= _ENOUGH

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token adds to a step; 0 before the first."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def line(self, tokens: int) -> tuple[float, float]:
        """Seconds of a step of so many tokens, and of each token more; only their ratio before any step."""
        if not self._weight:
            return 1.0, _PRIOR_SHARE
        prior = _PRIOR_SHARE * self._seconds / max(self._tokens, 1.0)
        slope = (self._covariance + _PRIOR_WEIGHT * prior) / (self._variance + _PRIOR_WEIGHT)
        slope = min(max(slope, 0.0), self._seconds / max(self._tokens, 1.0))
        return max(self._seconds + slope * (tokens - self._tokens), slope * tokens), slope

    def _note_prompt(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        beyond = seconds - (self.line(tokens)[0] if self._weight else 0.0)
        beyond = max(beyond, _LEAST_SHARE * seconds)
        if self._prompt_weight:
            beyond = min(beyond, 4 * self.prompt_token_s * prompt_tokens)
        self._prompt_weight = _PROMPT_KEPT * self._prompt_weight + 1.0
        self._prompt_tokens = _PROMPT_KEPT * self._prompt_tokens + prompt_tokens
        self._prompt_seconds = _PROMPT_KEPT * self._prompt_seconds + beyond
