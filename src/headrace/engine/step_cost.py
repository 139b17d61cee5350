"""What a step costs: learned from steps as they are timed, for all who have to decide before the next one."""

from __future__ import annotations

_KEPT = 0.995  # of what steps of other sizes said, at each new step of decodes
_MEAN_OF = 12.0  # steps of one size whose mean is kept, older ones fading
_LEAST_WEIGHT = 0.05  # below which a size is forgotten
_LINE_WEIGHT = 4.0  # steps of a size that say as much about it as all others do
_PRIOR_SHARE = 0.15  # of a step's time that one more token costs, until steps of several sizes were seen
_PRIOR_WEIGHT = 4.0

_LEAST_S = 1e-9  # no step takes no time, whatever a coarse clock says
_OUTLIER = 4.0  # times what was expected: more than that is the machine's doing

_PROMPT_KEPT = 0.97  # of what steps with prompt tokens said, at each new one
_LEAST_SHARE = (
    0.05  # of such a step's time that is taken for its prompt tokens', however the rest is estimated
)
_CONTEXT_SCALE = 1024.0  # tokens
_CONTEXT_DOUBT = 1e-3  # keeps the effect of contexts small until several were seen
_ENOUGH = 2.5  # steps of each kind, older ones fading, before predictions are offered


class StepCost:
    """Seconds of a step, in two parts that are measured apart.

    A few decoded or drafted tokens: a line, fitted to steps that had nothing else. There a step mostly reads
    weights, and one token more is cheap. Each size of step keeps a mean of its own, so that a long run of
    equal steps does not wipe out what is known of others.

    Prompt tokens: what a step with them took beyond that line, for each of them, and more the longer the
    context that they attend to: the end of a long prompt costs more than its beginning.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, list[float]] = {}  # by tokens: weight and mean seconds
        self._fit: tuple[float, float, float] | None = None  # made when it is asked for
        self._prompt_weight = self._prompt_tokens = self._prompt_seconds = 0.0  # weighted sums
        # Weighted means over steps with prompt tokens, of a token's context (in _CONTEXT_SCALE) and seconds.
        self._context = self._each_s = self._variance = self._covariance = 0.0

    def note(
        self, tokens: int, seconds: float, *, prompt_tokens: int = 0, context_tokens: float = 0.0
    ) -> None:
        """A step of so many decoded and drafted tokens, and so many of prompts, took so long.

        ``context_tokens``: those before each of the prompt tokens, summed over them.
        """
        seconds = max(seconds, _LEAST_S)
        if prompt_tokens:
            self._note_prompt(tokens, prompt_tokens, context_tokens, seconds)
            return
        of_size = self._sizes.get(tokens)
        if of_size is not None:
            seconds = min(seconds, _OUTLIER * of_size[1])
        elif self._sizes:
            seconds = min(seconds, _OUTLIER * self.line(tokens)[0])
        if of_size is None or len(self._sizes) > 1:
            self._fade()
            of_size = self._sizes.setdefault(tokens, [0.0, 0.0])
        of_size[0] = min(of_size[0] + 1.0, _MEAN_OF)
        of_size[1] += (seconds - of_size[1]) / of_size[0]
        self._fit = None

    def _fade(self) -> None:
        for size, kept in list(self._sizes.items()):
            kept[0] *= _KEPT
            if kept[0] < _LEAST_WEIGHT:
                del self._sizes[size]

    @property
    def is_measured(self) -> bool:
        """Whether a step without prompt tokens was seen, so that lines are in seconds."""
        return bool(self._sizes)

    @property
    def is_known(self) -> bool:
        """Whether enough steps of both kinds were seen to predict seconds."""
        return sum(weight for weight, _ in self._sizes.values()) >= _ENOUGH and self._prompt_weight >= _ENOUGH

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token has lately added to a step; 0 before the first."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0

    def prompt_token_s_at(self, context: float) -> float:
        """Seconds that a prompt token behind so many others adds to a step; 0 before the first."""
        slope = max(0.0, self._covariance / (self._variance + _CONTEXT_DOUBT))
        found = self._each_s + slope * (context / _CONTEXT_SCALE - self._context)
        return max(found, _LEAST_SHARE * self._each_s)  # contexts far from those that were seen

    def seconds(self, tokens: int) -> float:
        """Seconds of a step of so many tokens, as such steps have taken, or as others suggest."""
        guess = self.line(tokens)[0]
        weight, mean = self._sizes.get(tokens, (0.0, 0.0))
        return (weight * mean + _LINE_WEIGHT * guess) / (weight + _LINE_WEIGHT)

    def line(self, tokens: int) -> tuple[float, float]:
        """Seconds of a step of so many tokens, and of each token more; only their ratio before any step."""
        if not self._sizes:
            return 1.0, _PRIOR_SHARE
        mean_tokens, mean_seconds, slope = self._fit = self._fit or self._fit_line()
        return max(mean_seconds + slope * (tokens - mean_tokens), slope * tokens), slope

    def _fit_line(self) -> tuple[float, float, float]:
        """Mean tokens, mean seconds, and seconds of a token more: least squares over the weighted sizes."""
        sizes = self._sizes.items()
        total = sum(kept[0] for _, kept in sizes)
        mean_tokens = sum(kept[0] * size for size, kept in sizes) / total
        mean_seconds = sum(kept[0] * kept[1] for _, kept in sizes) / total
        variance = covariance = 0.0
        for size, (weight, seconds) in sizes:
            off = size - mean_tokens
            variance += weight * off * off
            covariance += weight * off * (seconds - mean_seconds)
        each_s = mean_seconds / max(mean_tokens, 1.0)
        slope = (covariance + _PRIOR_WEIGHT * _PRIOR_SHARE * each_s) / (variance + _PRIOR_WEIGHT)
        return mean_tokens, mean_seconds, min(max(slope, 0.0), each_s)

    def _note_prompt(self, tokens: int, prompt_tokens: int, context_tokens: float, seconds: float) -> None:
        beyond = seconds - (self.line(tokens)[0] if self._sizes else 0.0)
        beyond = max(beyond, _LEAST_SHARE * seconds)
        if self._prompt_weight:
            expected = max(self.prompt_token_s, self.prompt_token_s_at(context_tokens / prompt_tokens))
            beyond = min(beyond, _OUTLIER * expected * prompt_tokens)
        context, each_s = context_tokens / prompt_tokens / _CONTEXT_SCALE, beyond / prompt_tokens
        self._prompt_tokens = _PROMPT_KEPT * self._prompt_tokens + prompt_tokens
        self._prompt_seconds = _PROMPT_KEPT * self._prompt_seconds + beyond
        self._prompt_weight = weight = _PROMPT_KEPT * self._prompt_weight + 1.0
        share = 1.0 / weight
        off, late = context - self._context, each_s - self._each_s
        self._context += share * off
        self._each_s += share * late
        self._variance = (1 - share) * (self._variance + share * off * off)
        self._covariance = (1 - share) * (self._covariance + share * off * late)
