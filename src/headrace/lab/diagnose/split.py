"""Where a request's time goes: TTFT into network, queue, prefill and frontend, TPOT into a step alone and
neighbours.

Where the server reports queue and prefill time, they are taken from it and the rest of TTFT is the frontend
(tokenizer, chat template, HTTP). Elsewhere prefill is the slope of TTFT over prompt tokens, and the frontend
what is left of a request for no tokens; a prompt that a prefix cache knows tells how much of the slope is
the frontend's.
"""

from __future__ import annotations

import itertools
import statistics

import msgspec

from headrace.lab.diagnose.measurements import Gentle, Level, Measurements


class TTFTSplit(msgspec.Struct, kw_only=True):
    """Of a prompt of ``prompt_tokens`` with ``users`` at a time; milliseconds that add up to ``total_ms``.

    ``source``: "server" (its own histograms) or "slope" (what TTFT does over prompt lengths).
    """

    users: int
    prompt_tokens: float
    total_ms: float
    network_ms: float
    queue_ms: float
    prefill_ms: float
    frontend_ms: float
    source: str

    def share(self, part: str) -> float:
        """Of ``network``, ``queue``, ``prefill`` or ``frontend`` in the total."""
        return float(getattr(self, f"{part}_ms")) / self.total_ms if self.total_ms > 0 else 0.0


class TPOTSplit(msgspec.Struct, kw_only=True):
    """``alone_ms``: a step for one sequence (streaming the weights). ``neighbours_ms``: what the others
    add."""

    users: int
    total_ms: float
    alone_ms: float
    neighbours_ms: float


class Scaling(msgspec.Struct, kw_only=True):
    """How throughput grows with the sequences that run at once.

    A step takes ``alone_ms`` for the first and ``row_ms`` for each further one, its share of prefill
    included; ``prefill_ms`` is the prefill of a sequence's own prompt for each of its output tokens.
    ``measured``: from levels with different batches; else a row is taken to cost what a token costs in a
    prefill.
    """

    alone_ms: float
    row_ms: float
    prefill_ms: float
    measured: bool

    def tok_s(self, sequences: float) -> float:
        """Output tokens a second with so many sequences running."""
        n = max(sequences, 1.0)
        return 1000 * n / (self.alone_ms + (n - 1) * self.row_ms + self.prefill_ms)

    def gain(self, before: float, after: float) -> float:
        """By what factor throughput grows from ``before`` to ``after`` sequences."""
        return self.tok_s(after) / self.tok_s(before)


def round_trip_ms(m: Measurements) -> float:
    """The network's share of a request: one round trip, connections being open already.

    A health check costs a server nothing, and goes all the way where a handshake may end at a near proxy.
    """
    net = m.network
    if net.answer_ms is not None and net.path.endswith("/health"):
        return net.answer_ms
    return min((t for t in (net.connect_ms, net.answer_ms) if t is not None), default=0.0)


def prefill_slope(m: Measurements) -> float | None:
    """Milliseconds of TTFT for each prompt token that no cache knows: the median of all pairs' slopes.

    (Theil 1950, Sen 1968: one slow request does not tilt it.) None without two lengths.
    """
    points = [
        (g.prompt_tokens - g.cached_tokens, g.ttft_ms)
        for g in m.gentle
        if g.ttft_ms is not None and not g.repeated and g.prompt_tokens
    ]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] != a[0]]
    return max(statistics.median(slopes), 0.0) if slopes else None


def gentle_split(m: Measurements) -> TTFTSplit | None:
    """Of one user's request, with a prompt as long as the hard load's (the nearest there was)."""
    wanted = next((lv.prompt_tokens for lv in m.levels if lv.prompt_tokens), None) or 128.0
    known = [g for g in m.gentle if g.ttft_ms is not None and not g.repeated]
    if not known:
        return None
    g = min(known, key=lambda g: abs(g.prompt_tokens - wanted))
    network = round_trip_ms(m)
    server = _server_times(g)
    if server is not None:
        total = g.ttft_mean_ms or g.ttft_ms or 0.0  # the server's are means as well
        queue, prefill = server
        # Nobody is before the only user: what a server counts as queueing is its own way to the engine.
        queue = queue if _has_company(g) else 0.0
        return _fitted(1, g.prompt_tokens, total, network, queue, prefill, source="server")
    slope = prefill_slope(m)
    total = g.ttft_ms or 0.0
    if slope is None:
        return None
    tokens = g.prompt_tokens - g.cached_tokens
    step = g.tpot_ms or 0.0
    slope = max(slope - _frontend_slope(m, g, slope, network, step), 0.0)
    prefill = min(slope * tokens + step, max(total - network, 0.0))
    return _fitted(1, g.prompt_tokens, total, network, 0.0, prefill, source="slope")


def _has_company(g: Gentle) -> bool:
    """Whether the server had other requests than ours."""
    s = g.server
    return s is not None and ((s.running_max or 0) > 1 or (s.waiting_max or 0) > 1)


def _server_times(g: Gentle) -> tuple[float, float] | None:
    """Queue and prefill of a request, as the server reports them."""
    s = g.server
    if s is None:
        return None
    if s.prefill_time_mean_ms is not None:
        return s.queue_time_mean_ms or 0.0, s.prefill_time_mean_ms
    if s.prefill_ms_per_token is not None:
        return s.queue_time_mean_ms or 0.0, s.prefill_ms_per_token * (g.prompt_tokens - g.cached_tokens)
    return None


def _frontend_slope(m: Measurements, g: Gentle, slope: float, network: float, step: float) -> float:
    """How much of TTFT's slope remains when a cache knows the prompt: the tokenizer's part of it."""
    for repeated in m.gentle:
        hit = repeated.cached_tokens > 0.5 * repeated.prompt_tokens
        if repeated.repeated and hit and repeated.ttft_ms is not None and repeated.prompt_tokens:
            at_none = (g.ttft_ms or 0.0) - slope * (g.prompt_tokens - g.cached_tokens)
            left = repeated.ttft_ms - max(at_none, network + step)
            return min(max(left, 0.0) / repeated.prompt_tokens, slope)
    return 0.0


def _fitted(
    users: int, tokens: float, total: float, network: float, queue: float, prefill: float, *, source: str
) -> TTFTSplit:
    """Parts that add up: what is measured apart never exceeds the whole."""
    network = min(network, total)
    room = max(total - network, 0.0)
    scale = min(1.0, room / (queue + prefill)) if queue + prefill > 0 else 1.0
    return TTFTSplit(
        users=users,
        prompt_tokens=tokens,
        total_ms=total,
        network_ms=network,
        queue_ms=queue * scale,
        prefill_ms=prefill * scale,
        frontend_ms=max(room - (queue + prefill) * scale, 0.0),
        source=source,
    )


def hard_split(m: Measurements, gentle: TTFTSplit | None, lv: Level) -> TTFTSplit | None:
    """Of a request under a level's load. Without the server's word, all that the load adds is queue."""
    if lv.ttft_ms is None or gentle is None:
        return None
    network = round_trip_ms(m)
    s = lv.server
    tokens = lv.prompt_tokens or gentle.prompt_tokens
    if s is not None and s.queue_time_mean_ms is not None and s.prefill_time_mean_ms is not None:
        queue, prefill = max(s.queue_time_mean_ms - _way_ms(m), 0.0), s.prefill_time_mean_ms
        total = lv.ttft_mean_ms or lv.ttft_ms  # the server's are means as well
        return _fitted(lv.users, tokens, total, network, queue, prefill, source="server")
    total = max(lv.ttft_ms, network + gentle.prefill_ms + gentle.frontend_ms)
    queue = total - network - gentle.prefill_ms - gentle.frontend_ms
    return _fitted(lv.users, tokens, total, network, queue, gentle.prefill_ms, source="slope")


def _way_ms(m: Measurements) -> float:
    """What the server counts as queueing although nobody is before: the least of what single users met."""
    alone = [g.server.queue_time_mean_ms for g in m.gentle if g.server is not None and not _has_company(g)]
    return min((queue for queue in alone if queue is not None), default=0.0)


def best_level(m: Measurements) -> Level | None:
    """The fewest users that bring 95% of the most throughput."""
    most = max((lv.tok_s for lv in m.levels), default=0.0)
    return next((lv for lv in m.levels if most > 0 and lv.tok_s >= 0.95 * most), None)


def top_level(m: Measurements) -> Level | None:
    """The most users that were tried and got answers."""
    answered = [lv for lv in m.levels if lv.completed]
    return answered[-1] if answered else None


def running(lv: Level) -> float:
    """Sequences that decoded at once, by Little's law (throughput × time per token), within what can be."""
    if lv.tpot_ms is None:
        return 1.0
    most = float(lv.users)
    if lv.server is not None and lv.server.running_max:
        most = min(most, lv.server.running_max)
    return min(max(lv.tok_s * lv.tpot_ms / 1000, 1.0), most)


def tpot_split(m: Measurements) -> TPOTSplit | None:
    """At the level with the most throughput."""
    one = next((lv for lv in m.levels if lv.users == 1 and lv.tpot_ms), None)
    alone = one.tpot_ms if one is not None else next((g.tpot_ms for g in m.gentle if g.tpot_ms), None)
    best = best_level(m)
    if alone is None or best is None or best.tpot_ms is None:
        return None
    alone = min(alone, best.tpot_ms)
    return TPOTSplit(
        users=best.users, total_ms=best.tpot_ms, alone_ms=alone, neighbours_ms=best.tpot_ms - alone
    )


def scaling(m: Measurements) -> Scaling | None:
    """From the levels, or from one user's step and prefill if nothing ever ran side by side."""
    points = [(running(lv), lv.tpot_ms) for lv in m.levels if lv.tpot_ms is not None and lv.completed]
    if not points:
        return None
    alone = min(tpot for _, tpot in points)
    slope = prefill_slope(m) or 0.0
    first = next((lv for lv in m.levels if lv.output_tokens), None)
    ratio = 0.0
    if first is not None and first.prompt_tokens and first.output_tokens:
        ratio = first.prompt_tokens * (1 - (first.cached_share or 0.0)) / first.output_tokens
    prefill = slope * ratio
    widest = max(n for n, _ in points)
    if widest >= 1.5:
        # Least squares through the point of one sequence alone.
        over = [(n - 1, tpot - alone) for n, tpot in points]
        row = sum(x * y for x, y in over) / max(sum(x * x for x, _ in over), 1e-9)
        return Scaling(alone_ms=alone, row_ms=max(row, 0.0), prefill_ms=prefill, measured=True)
    return Scaling(alone_ms=alone, row_ms=min(slope, alone) + prefill, prefill_ms=prefill, measured=False)
