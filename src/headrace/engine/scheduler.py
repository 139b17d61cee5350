"""The one rule of scheduling: every running sequence gets as many tokens as it lacks, within a budget."""

from __future__ import annotations

import math
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from headrace.backend.batch import Batch, StepResult
from headrace.engine.assemble import Assembler
from headrace.engine.config import SchedulerConfig
from headrace.engine.deadlines import Deadlines
from headrace.engine.drafter import Drafter
from headrace.engine.entries import Entries
from headrace.engine.grammar import Grammar
from headrace.engine.kv_cache import KVCache
from headrace.engine.outcome import NOT_FINITE, Outcome, StepOutcomes, why_failed
from headrace.engine.pace import Pace
from headrace.engine.request import EngineOutput, EngineRequest
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Request, Sequence
from headrace.engine.share import Share
from headrace.engine.speculation import Speculation
from headrace.engine.step_cost import StepCost
from headrace.engine.waiting import WaitingLine

_by_rank = attrgetter("rank")


class Scheduler:
    """Decides who computes what in the next step, and takes in what came of the last one.

    Chunked prefill, prefix hits, speculation and preemption all follow from two numbers of a sequence (its
    tokens, a draft's included, and tokens computed) and one order (priority and age, then arrival, then
    choice):

    - a sequence enters only with blocks for all tokens that it knows, and nobody overtakes one that waits
      for blocks;
    - when a running sequence needs a block and there is none, one that is behind it in the order gives up its
      blocks: the one that loses least by it. It goes back to its place in the waiting line, keeping its
      tokens. The first in order is never the victim of another, so it always finishes: there is no livelock.

    Between tenants the waiting line (``waiting.py``) is fair. A draft lives for one step: from
    :meth:`schedule`, which gives it only what nobody else wants, to :meth:`commit`, which keeps of it what
    was sampled anyway. None of this changes a token of any answer.

    A sequence whose blocks come from the second tier has no share of the steps until they are there. So one
    that was preempted is swapped or computed again, whichever seems to be sooner done (``kv_tier.py``).

    ``whole``: for encoders, which need all of a sequence's tokens in one step; it ends with that step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logit_rows: int,
        whole: bool = False,
        drafter: Drafter | None = None,
        cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cost``: what steps cost, for others to look at; None: nobody else does."""
        self._whole = whole
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.generation_tokens = 0
        self.entries = Entries(prefix_caching=kv_cache.prefix_caching)
        self.deadlines_missed = 0
        self.deadlines_refused = 0
        self.step_budget = 0
        cost = cost or StepCost()
        speculative = config.speculative
        self.speculation = None if speculative is None else Speculation(speculative, cost, drafter, clock)
        self._drafted = 0 if speculative is None else speculative.num_speculative_tokens
        self._config = config
        self._kv = kv_cache
        self._rows = SamplingRows(kv_cache.max_sequences, vocab_size)
        self._assembler = Assembler(kv_cache, self._rows)
        self._free_rows = list(range(kv_cache.max_sequences - 1, -1, -1))
        self._vocab_size = vocab_size
        self._spare_rows = max_logit_rows - kv_cache.max_sequences  # beyond one a sequence
        self._pace = Pace(cost, None if config.tpot_target_ms is None else config.tpot_target_ms / 1000)
        self._deadlines = Deadlines(cost, max_model_len)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingLine(config.priority_aging_s)
        self._running: list[Sequence] = []  # by rank
        self._in_flight: Share | None = None
        self._last_end: float | None = None  # of the step before, if this one follows at once
        self._prompt_budget = config.max_num_batched_tokens  # of the last step that had room for any
        self._num_arrived = 0
        self._next_expiry = math.inf

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: new ones and preempted ones."""
        return self._waiting.size

    @property
    def num_tenants(self) -> int:
        """Tenants that have a sequence, waiting or running."""
        return self._waiting.num_tenants

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # Arrivals and departures

    def add(self, request: EngineRequest, *, seed: int, now: float, grammar: Grammar | None = None) -> None:
        """Put the sequences of a valid request into the waiting line."""
        arrived = Request(
            request,
            number=self._num_arrived,
            seed=seed,
            now=now,
            vocab_size=self._vocab_size,
            max_model_len=self.max_model_len,
            grammar=grammar,
            tenant=self._waiting.enter(request.tenant, request.tenant_weight, len(request.open_choices)),
            aging_s=self._config.priority_aging_s,
        )
        self._num_arrived += 1
        self._requests[arrived.request_id] = arrived
        for seq in arrived.sequences.values():
            self._waiting.add(seq)
        self._deadlines.add(arrived)
        self._next_expiry = min(self._next_expiry, arrived.arrival_time + self._config.max_queue_time_s)

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        """End a request or one of its sequences now. Unknown ones are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        ended = [seq for seq in request.sequences.values() if choice is None or seq.choice == choice]
        for seq in ended:
            self._remove(seq)
        return [seq.output("abort") for seq in ended]

    def abort_all(self) -> list[EngineOutput]:
        """End everything."""
        return [output for request_id in list(self._requests) for output in self.abort(request_id)]

    def expire(self, now: float) -> list[EngineOutput]:
        """End what has waited too long for its first step, and what is or will be too late for its client."""
        outputs = [] if now < self._next_expiry else self._expire_waiting(now)
        if not self._deadlines.by_time:
            return outputs
        for request in self._deadlines.passed(now):
            self.deadlines_missed += 1
            message = f"The answer was not complete within timeout_s = {request.params.timeout_s:g}."
            outputs += self._end_with_error(request, "DeadlineExceededError", message)
        if self._deadlines.is_due(now):
            seen: set[bytes] = set()
            hopeless = self._deadlines.hopeless(
                now,
                self._running,
                self._waiting.lines(),
                lambda seq: seq.num_tokens - self._kv.num_findable(seq, seen),
                step_tokens=self._prompt_budget,
                tokens_per_step=1 + self._drafted,
            )
            for request, why in hopeless.items():
                self.deadlines_refused += 1
                outputs += self._end_with_error(request, "DeadlineExceededError", why)
        return outputs

    # A step

    def schedule(self, now: float) -> Batch | None:
        """The next step's work, or None when there is none. :meth:`commit` must follow every Batch."""
        if self._kv.tier is not None:
            self._take_in_loaded()
        self._make_room()
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self._running:
            if seq.num_loading:
                continue
            lacks_one = seq.num_tokens - seq.num_computed_tokens == 1
            if lacks_one and (seq.prompt_logprobs is None or not seq.lacks_prompt_logprobs):
                decodes.append(seq)
            else:
                prompts.append(seq)
        share = Share(self._config.max_num_batched_tokens, self._spare_rows)
        if self.speculation is not None and decodes:
            before_s = self.speculation.seconds
            self.speculation.draft(decodes, share, self._kv, self.num_running, self.max_model_len)
            share.drafting_s = self.speculation.seconds - before_s
        share.give_decodes(decodes)
        context = prompts[0].num_computed_tokens if prompts else 0
        self._pace.limit(share, context)
        self.step_budget = share.decode_tokens + share.budget
        self._prompt_budget = share.budget or self._prompt_budget
        if prompts or self._waiting.size:
            for seq in self._prompts_in_order(prompts, share, now):
                share.give(seq)
                self._waiting.computed(seq, seq.num_scheduled)
        self._in_flight = share
        if share.scheduled:
            return self._assembler.batch(share.scheduled)
        self._last_end = None
        return None

    def commit(self, result: StepResult, now: float, seconds: float) -> list[EngineOutput]:
        """Take in what the step sampled: extend sequences, publish computed blocks, end what is done.

        ``seconds``: what the runner took for it. Those who wait for its tokens wait longer, from the end of
        the step before, and that is what a step is taken to cost.
        """
        share, self._in_flight = self._in_flight, None
        assert share is not None
        if self._last_end is not None:
            seconds = max(seconds, now - self._last_end - share.drafting_s)
        self._pace.note(share, seconds)
        outcomes = StepOutcomes(result)
        outputs: list[EngineOutput] = []
        for seq in share.scheduled:
            if self._whole:
                outputs.append(self._report_vector(seq, outcomes.take_vector(seq), now))
            elif (output := self._report(seq, outcomes.take(seq), now)) is not None:
                outputs.append(output)
        self._last_end = now if self._running else None
        return outputs

    # Inside

    def _take_in_loaded(self) -> None:
        """Go on with sequences whose blocks have come from the second tier."""
        for seq in self._kv.take_in():
            if seq.num_loading:  # a block could not be read: it is looked for, and computed, like any other
                self._send_back(seq)
            else:
                self.entries.found(seq)

    def _make_room(self) -> None:
        """Blocks for every running sequence's next token, if need be at the expense of a later one."""
        short = [seq for seq in self._running if seq.num_tokens > seq.num_slots]
        for seq in short:
            while seq.row >= 0 and not self._kv.grow(seq):
                self._preempt(self._victim(seq))

    def _victim(self, seq: Sequence) -> Sequence:
        """Of those behind ``seq`` the one that loses least, the last among equals; else ``seq`` itself."""
        behind = self._running[bisect_right(self._running, seq.rank, key=_by_rank) :]
        return min(reversed(behind), key=self._kv.num_lost, default=seq)

    def _preempt(self, seq: Sequence) -> None:
        self._send_back(seq)
        self.num_preemptions += 1

    def _send_back(self, seq: Sequence) -> None:
        """From the running sequences to its place in the waiting line."""
        self._kv.release(seq)
        self._running.remove(seq)
        self._free_row(seq)
        seq.num_computed_tokens = 0
        self._waiting.add(seq)

    def _prompts_in_order(self, running: list[Sequence], share: Share, now: float) -> Iterator[Sequence]:
        """Those that lack more than a token, newcomers included, while tokens last: the most urgent first."""
        line = self._waiting
        if line.num_tenants > 1:
            running = sorted(running, key=lambda seq: line.precedence(seq, now))
        entering = line.in_order(now) if line.size else iter(())
        newcomer = next(entering, None)
        at = 0
        while share.budget > 0:
            seq = running[at] if at < len(running) else None
            if not self._free_rows:
                newcomer = None
            if newcomer is not None and (seq is None or line.goes_first(newcomer, seq, now)):
                entered = self._admit(newcomer, share, now)
                if entered and not newcomer.num_loading:
                    yield newcomer
                newcomer = None if entered is None else next(entering, None)
            elif seq is not None:
                yield seq
                at += 1
            else:
                return

    def _admit(self, seq: Sequence, share: Share, now: float) -> bool | None:
        """Move a sequence from the waiting line to the running ones.

        False: it waits for another's computation, and those behind it may go first. None: there is no room
        for it, and so for nobody.
        """
        if self._whole and seq.num_lacking > share.budget:
            return None  # the next step has room for it
        prefix = self._kv.find_prefix(seq)
        if prefix is None:
            return False
        seq.row = self._free_rows[-1]
        # Each running sequence will soon need one block more: without them the newcomer would be the next
        # victim.
        headroom = 0 if self._whole else len(self._running)
        if not self._kv.admit(seq, prefix, headroom=headroom):
            seq.row = -1
            return None
        self._free_rows.pop()
        self.entries.begin(seq, self._waiting, now)
        if not seq.num_loading:
            self.entries.found(seq)
        insort(self._running, seq, key=_by_rank)
        self._rows.fill(seq)
        return True

    def _report(self, seq: Sequence, outcome: Outcome, now: float) -> EngineOutput | None:
        """What the step did for ``seq``: its news, if there is any."""
        if outcome.failed:
            # Its K and V may be as broken as its logits: no block of this step becomes findable.
            self._remove(seq)
            return seq.error_output(*why_failed(seq))
        if outcome.drafted and self.speculation is not None:
            self.speculation.note_draft(seq, outcome.drafted, outcome.accepted)
        if seq.num_computed_tokens >= seq.commit_at:
            self._kv.commit(seq)
        if outcome.num_tokens == 0:
            return None
        self.generation_tokens += outcome.num_tokens
        seq.tenant.serve(outcome.num_tokens)
        is_first = seq.first_token_time is None
        if is_first:
            seq.first_token_time = now
        if outcome.finish_reason is not None:
            self._remove(seq)
        elif len(seq.untold) < seq.gather and not is_first:
            return None
        output = seq.output(outcome.finish_reason)
        if is_first:
            output.prompt_logprobs = seq.prompt_logprobs
        return output

    def _report_vector(self, seq: Sequence, vector: bytes | None, now: float) -> EngineOutput:
        """The whole news of an encoder's sequence, which ends with its only step."""
        self._remove(seq)
        if vector is None:
            return seq.error_output("GenerationError", NOT_FINITE)
        seq.first_token_time = now
        output = seq.output("stop")
        output.vector = vector
        return output

    def _expire_waiting(self, now: float) -> list[EngineOutput]:
        limit = self._config.max_queue_time_s
        fresh = [
            seq for seq in self._waiting if seq.first_scheduled_time is None and not seq.request.restarted
        ]
        late = [seq for seq in fresh if seq.request.arrival_time + limit <= now]
        for seq in late:
            self._remove(seq)
        self._next_expiry = min(
            (seq.request.arrival_time + limit for seq in fresh if seq.request.arrival_time + limit > now),
            default=math.inf,
        )
        message = f"The request waited longer than {limit:g} s for its turn; try again later."
        return [seq.error_output("OverloadedError", message) for seq in late]

    def _end_with_error(self, request: Request, kind: str, message: str) -> list[EngineOutput]:
        ended = list(request.sequences.values())
        for seq in ended:
            self._remove(seq)
        return [seq.error_output(kind, message) for seq in ended]

    def _remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is, and its request with the last one."""
        if seq.row >= 0:
            self._kv.release(seq)
            self._running.remove(seq)
            self._free_row(seq)
        else:
            self._waiting.remove(seq)
        if self.speculation is not None:
            self.speculation.forget(seq)
        request = seq.request
        self._waiting.leave(seq)
        del request.sequences[seq.choice]
        if not request.sequences:
            del self._requests[request.request_id]

    def _free_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = -1
