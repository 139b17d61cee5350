"""WaitingLine: who waits for blocks, and who is next: priority, age, and a fair share for every tenant."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from headrace.engine.sequence import Rank, Sequence
from headrace.engine.tenant import Tenant

_by_rank = attrgetter("rank")
_SPARE_TENANTS = 64  # without work, that are remembered before somebody looks whether they still matter


class WaitingLine:
    """The sequences without blocks, and what each tenant has had.

    A tenant's own sequences go by rank (see :class:`Sequence`). Between tenants the next is chosen anew each
    time: the lowest priority first, each ``aging_s`` seconds without an admission counting as a level; then
    whoever was served least for its weight; then rank. So nobody waits for ever, whatever others send.

    Service is counted in tokens: a prompt's as they are computed, as far as no cache had them, the output's
    as they come. Who is admitted next depends on what has been promised as well. A tenant that was away comes
    back level with the least served one that was not: idle time is not saved up. Source: Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024 (its virtual token counter).
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._tenants: dict[str, Tenant] = {}
        self.size = 0  # sequences
        self.num_tenants = 0  # that have sequences

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, tenant by tenant."""
        for tenant in self._tenants.values():
            yield from tenant.waiting

    def lines(self) -> Iterator[list[Sequence]]:
        """All that wait, in the order of each tenant."""
        return (tenant.waiting for tenant in self._tenants.values())

    def enter(self, name: str, weight: float, sequences: int) -> Tenant:
        """The tenant of that name, for a request of so many sequences that are going to be added."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = Tenant()
        if tenant.num_sequences == 0:
            least = min((each.served for each in self._active()), default=0.0)
            tenant.served = max(tenant.served, least)
            self.num_tenants += 1
        tenant.weight = weight
        tenant.num_sequences += sequences
        return tenant

    def leave(self, seq: Sequence) -> None:
        """``seq``, which waits no longer, has ended."""
        tenant = seq.tenant
        tenant.promised -= seq.num_promised
        tenant.num_sequences -= 1
        if tenant.num_sequences == 0:
            self.num_tenants -= 1
            if self.num_tenants == 0:
                self._tenants.clear()  # nobody competes: nobody is ahead

    def add(self, seq: Sequence) -> None:
        """``seq`` waits: it is new, or was preempted."""
        insort(seq.tenant.waiting, seq, key=_by_rank)
        self.size += 1

    def remove(self, seq: Sequence) -> None:
        """``seq`` waits no longer."""
        line = seq.tenant.waiting
        del line[bisect_left(line, seq.rank, key=_by_rank)]
        self.size -= 1

    def admitted(self, seq: Sequence, tokens: int, now: float) -> None:
        """``seq`` has blocks; ``tokens`` of its prompt are going to be computed for the first time."""
        self.remove(seq)
        tenant = seq.tenant
        tenant.admitted_time = now
        tenant.promised += tokens
        seq.num_promised += tokens

    def computed(self, seq: Sequence, tokens: int) -> None:
        """So many of its prompt's tokens are in the next step: the first time, they count as service."""
        paid = min(tokens, seq.num_promised)
        tenant = seq.tenant
        seq.num_promised -= paid
        tenant.promised -= paid
        tenant.serve(paid)

    def in_order(self, now: float) -> Iterator[Sequence]:
        """Who is next, again and again. One that is still there when the iteration goes on is passed over."""
        places = {tenant: 0 for tenant in self._tenants.values() if tenant.waiting}
        while places:
            if len(places) == 1:
                [tenant] = places
            else:
                heads = {each: each.waiting[place] for each, place in places.items()}
                tenant = min(
                    places, key=lambda each: (self._level(heads[each], now), each.claimed, heads[each].rank)
                )
            line, place = tenant.waiting, places[tenant]
            seq = line[place]
            yield seq
            if place < len(line) and line[place] is seq:
                places[tenant] = place = place + 1
            if place >= len(line):
                del places[tenant]

    def goes_first(self, newcomer: Sequence, running: Sequence, now: float) -> bool:
        """Whether the prompt of ``newcomer``, which waits, is to be computed before that of ``running``."""
        if self.num_tenants == 1:
            return newcomer.rank < running.rank
        return self.precedence(newcomer, now) < self.precedence(running, now)

    def precedence(self, seq: Sequence, now: float) -> tuple[float, float, Rank]:
        """Orders prompts of several tenants that are to be computed: lower goes first."""
        return self._level(seq, now), seq.tenant.served, seq.rank

    def _level(self, seq: Sequence, now: float) -> float:
        """Its priority, by as much lower as its tenant has had no admission meanwhile."""
        if not self._aging_s:
            return seq.request.priority
        since = max(seq.request.arrival_time, seq.tenant.admitted_time)
        return seq.request.priority - (now - since) // self._aging_s

    def _active(self) -> Iterator[Tenant]:
        return (tenant for tenant in self._tenants.values() if tenant.num_sequences)

    def _forget_idle(self) -> None:
        """Those that would come back no better off than if they had never been here."""
        if len(self._tenants) < 2 * self.num_tenants + _SPARE_TENANTS:
            return
        least = min((tenant.served for tenant in self._active()), default=math.inf)
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.num_sequences or tenant.served > least
        }
