"""Is one version worse than the other? Tests that may be looked at after every request, and percentiles.

The test is the two-sample e-process of Turner, Ly and Grünwald, "Generic E-variables for exact sequential
k-sample tests that allow for optional stopping" (Journal of Statistical Planning and Inference 230, 2024),
one-sided, with Krichevsky-Trofimov estimates from what came before. Outcomes are in [0, 1], 1 is bad. While
the candidate is no worse, the e-value stays below 1/alpha for ever with probability 1 - alpha (Ville's
inequality), so a trial can be watched all the time and stopped at any time. The factor is convex in an
outcome, so that it holds for scores between 0 and 1 as it does for failures.

Latencies join by whether they pass a threshold that is fixed before they come: the stable version's
percentile. Comparing how often both pass it compares the percentiles themselves, as in Howard and Ramdas,
"Sequential estimation of quantiles with applications to A/B testing and best-arm identification" (Bernoulli
28, 2022).
"""

from __future__ import annotations

import math

import msgspec

_GROWTH = 1.04  # of a sketch's buckets: percentiles are right to 2%
_LEAST = 1e-6  # seconds; shorter ones count as that


class Sums(msgspec.Struct):
    """``count`` outcomes of one version, ``bad`` in all."""

    count: int = 0
    bad: float = 0.0

    def add(self, bad: float) -> None:
        """One more outcome, 0 (good) to 1 (bad)."""
        self.count += 1
        self.bad += bad

    def join(self, other: Sums) -> None:
        """Take in another's."""
        self.count += other.count
        self.bad += other.bad

    @property
    def mean(self) -> float:
        """The share that was bad; 0 where nothing is known."""
        return self.bad / self.count if self.count else 0.0

    @property
    def guess(self) -> float:
        """The Krichevsky-Trofimov estimate of the share, never 0 or 1."""
        return (self.bad + 0.5) / (self.count + 1)


class Evidence(msgspec.Struct):
    """What is known of one measure of two versions.

    ``worse`` and ``better``: logarithms of the e-values for the candidate being worse, or better, than the
    stable version; ``worst`` and ``best``: their highest so far.
    """

    stable: Sums = msgspec.field(default_factory=Sums)
    candidate: Sums = msgspec.field(default_factory=Sums)
    worse: float = 0.0
    better: float = 0.0
    worst: float = 0.0
    best: float = 0.0
    # a block that has outcomes of one version only waits for the other's
    waiting_stable: Sums = msgspec.field(default_factory=Sums)
    waiting_candidate: Sums = msgspec.field(default_factory=Sums)

    def add(self, stable: Sums, candidate: Sums) -> None:
        """A block of outcomes that came together."""
        self.waiting_stable.join(stable)
        self.waiting_candidate.join(candidate)
        ours, theirs = self.waiting_candidate, self.waiting_stable
        if not ours.count or not theirs.count:
            return
        self.worse += _log_factor(self.stable, self.candidate, theirs, ours)
        self.better += _log_factor(self.candidate, self.stable, ours, theirs)
        self.worst = max(self.worst, self.worse)
        self.best = max(self.best, self.better)
        self.stable.join(theirs)
        self.candidate.join(ours)
        self.waiting_stable, self.waiting_candidate = Sums(), Sums()

    @property
    def p_worse(self) -> float:
        """Always-valid p of "the candidate is no worse"."""
        return math.exp(-self.worst)

    @property
    def p_differs(self) -> float:
        """Always-valid p of "there is no difference", both sides taken together."""
        return min(1.0, 2 * math.exp(-max(self.worst, self.best)))


def _log_factor(seen_low: Sums, seen_high: Sums, low: Sums, high: Sums) -> float:
    """By how much a block speaks for the second version's share being higher, from estimates before it."""
    first, second = seen_low.guess, seen_high.guess
    if second <= first:  # what was seen does not say so: nothing is wagered
        return 0.0
    both = (low.count * first + high.count * second) / (low.count + high.count)
    return _log_ratio(low, first, both) + _log_ratio(high, second, both)


def _log_ratio(block: Sums, share: float, null: float) -> float:
    good = block.count - block.bad
    return block.bad * math.log(share / null) + good * math.log((1 - share) / (1 - null))


class Sketch(msgspec.Struct):
    """Percentiles of positive numbers to 2%: counts in buckets whose bounds grow by 4%.

    As DDSketch (Masson, Rim and Lee, VLDB 2019).
    """

    count: int = 0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)

    def add(self, value: float) -> None:
        """One more number."""
        bucket = math.ceil(math.log(max(value, _LEAST)) / math.log(_GROWTH))
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1

    def percentile(self, percent: float) -> float | None:
        """The number that so many percent are not above; None where there are none."""
        left = math.ceil(self.count * percent / 100)
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return float(2 * _GROWTH**bucket / (1 + _GROWTH))
        return None
