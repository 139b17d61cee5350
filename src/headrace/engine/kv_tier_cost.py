"""TierCost: whether a block is sooner brought back from the second tier than computed again."""

from __future__ import annotations

from headrace.backend.batch import BLOCK_SIZE
from headrace.engine.step_cost import StepCost

_KEPT = 0.9  # of what earlier blocks said, at each new one
_LEAST_OUTLIER_S = 1e-3
_LOOK_EVERY = 64  # refusals, until one is let through: costs change, and are seen by paying them only


class FadingMean:
    """Seconds, older ones fading; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._is_known = False

    def note(self, seconds: float) -> None:
        """One more."""
        if not self._is_known:
            self.value, self._is_known = seconds, True
        else:  # now and then the machine does something else meanwhile
            self.value = _KEPT * self.value + (1 - _KEPT) * min(
                seconds, max(4 * self.value, _LEAST_OUTLIER_S)
            )


class TierCost:
    """Seconds that a block takes: out of the first tier, from the store, and back. Computing it again takes
    what its prompt tokens have taken lately. Nothing is refused before it was measured.
    """

    def __init__(self, steps: StepCost) -> None:
        self.out = FadingMean()
        self.read = FadingMean()
        self.back = FadingMean()
        self._steps = steps
        self._refused = 0

    def keeping_pays(self) -> bool:
        """Whether a block that is given up is worth its copy, if somebody comes for it."""
        return self._pays(self.out.value + self.read.value + self.back.value, 1)

    def loading_pays(self, count: int, before: int) -> bool:
        """Whether ``count`` blocks are, when the store has so many to read ``before`` them."""
        return self._pays((before + count) * self.read.value + count * self.back.value, count)

    def _pays(self, seconds: float, blocks: int) -> bool:
        computing = blocks * BLOCK_SIZE * self._steps.prompt_token_s
        if computing == 0.0 or seconds < computing:
            return True
        self._refused += 1
        return self._refused % _LOOK_EVERY == 0
