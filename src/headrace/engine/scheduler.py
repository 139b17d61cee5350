"""The one rule of scheduling: every running sequence gets as many tokens as it lacks, within a budget."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from headrace.backend.batch import Batch, StepResult
from headrace.engine.assemble import assemble
from headrace.engine.config import SchedulerConfig
from headrace.engine.grammar import Grammar
from headrace.engine.kv_cache import KVCache
from headrace.engine.outcome import NOT_FINITE, Outcome, StepOutcomes, why_failed
from headrace.engine.request import EngineOutput, EngineRequest
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Request, Sequence
from headrace.engine.share import Share
from headrace.engine.speculation import Speculation

_by_rank = attrgetter("rank")


class Scheduler:
    """Decides who computes what in the next step, and takes in what came of the last one.

    Chunked prefill, prefix hits, speculation and preemption all follow from two numbers of a sequence (its
    tokens, a draft's included, and tokens computed) and one order (priority, then arrival, then choice):

    - a sequence enters only with blocks for all tokens that it knows, and nobody overtakes one that waits
      for blocks;
    - when a running sequence needs a block and there is none, the last in order gives up its blocks and goes
      back to its place in the waiting line, keeping its tokens. The first in order is never the victim of
      another, so it always finishes: there is no livelock.

    A draft lives for one step: from :meth:`schedule`, which gives it only what nobody else wants, to
    :meth:`commit`, which keeps of it what was sampled anyway.

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
        speculation: Speculation | None = None,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._config = config
        self._kv = kv_cache
        self._rows = SamplingRows(kv_cache.max_sequences, vocab_size)
        self._free_rows = list(range(kv_cache.max_sequences - 1, -1, -1))
        self._vocab_size = vocab_size
        self._spare_rows = max_logit_rows - kv_cache.max_sequences  # beyond one a sequence
        self._speculation = speculation
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._in_flight: list[Sequence] = []
        self._num_arrived = 0
        self._next_expiry = math.inf

    @property
    def num_running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: new ones and preempted ones."""
        return len(self._waiting)

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
            grammar=grammar,
        )
        self._num_arrived += 1
        self._requests[arrived.request_id] = arrived
        for seq in arrived.sequences.values():
            insort(self._waiting, seq, key=_by_rank)
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
        """End what has waited for its first step longer than ``max_queue_time_s``."""
        if now < self._next_expiry:
            return []
        limit = self._config.max_queue_time_s
        fresh = [seq for seq in self._waiting if seq.first_scheduled_time is None]
        late = [seq for seq in fresh if seq.request.arrival_time + limit <= now]
        for seq in late:
            self._remove(seq)
        self._next_expiry = min(
            (seq.request.arrival_time + limit for seq in fresh if seq.request.arrival_time + limit > now),
            default=math.inf,
        )
        message = f"The request waited longer than {limit:g} s for its turn; try again later."
        return [seq.error_output("OverloadedError", message) for seq in late]

    # A step

    def schedule(self, now: float) -> Batch | None:
        """The next step's work, or None when there is none. :meth:`commit` must follow every Batch."""
        self._make_room()
        share = Share(self._config.max_num_batched_tokens, self._spare_rows)
        if self._speculation is not None:
            share.spare_rows -= self._draft(self._speculation, share)
        for seq in sorted(self._running, key=_lacks_many):  # those that only lack their last token come first
            share.give(seq)
        for seq in self._admit(share, now):
            share.give(seq)
        self._in_flight = share.scheduled
        return assemble(share.scheduled, self._kv, self._rows) if share.scheduled else None

    def commit(self, result: StepResult, now: float) -> list[EngineOutput]:
        """Take in what the step sampled: extend sequences, publish computed blocks, end what is finished."""
        outcomes = StepOutcomes(result, self.max_model_len)
        outputs: list[EngineOutput] = []
        for seq in self._in_flight:
            if self._whole:
                outputs.append(self._report_vector(seq, outcomes.take_vector(seq), now))
            elif (output := self._report(seq, outcomes.take(seq), now)) is not None:
                outputs.append(output)
        self._in_flight = []
        return outputs

    @property
    def only_decodes(self) -> bool:
        """Whether the step in flight has no prompt tokens: every sequence in it samples a token."""
        return all(
            seq.num_logit_rows == seq.num_scheduled and not seq.lacks_prompt_logprobs
            for seq in self._in_flight
        )

    # Inside

    def _make_room(self) -> None:
        """Blocks for every running sequence's next token: the first in order first, at the last's expense."""
        for seq in list(self._running):
            while seq.row >= 0 and not self._kv.grow(seq):
                self._preempt(self._running[-1])

    def _preempt(self, seq: Sequence) -> None:
        self._kv.release(seq)
        self._running.remove(seq)
        self._free_row(seq)
        seq.num_computed_tokens = 0
        insort(self._waiting, seq, key=_by_rank)
        self.num_preemptions += 1

    def _draft(self, speculation: Speculation, share: Share) -> int:
        """Place drafts behind the tokens of those that decode; returns how many tokens they have."""
        room = min(share.spare_rows, share.budget - len(self._running))
        decodes = [seq for seq in self._running if seq.num_lacking == 1 and not seq.lacks_prompt_logprobs]
        if room <= 0 or not decodes:
            return 0
        limits = [min(self._most_drafted(seq), room // len(decodes) or 1) for seq in decodes]
        placed = 0
        for seq, draft in zip(decodes, speculation.propose(decodes, limits), strict=True):
            if not draft or placed + len(draft) > room:
                continue
            seq.place_draft(draft)
            # Blocks that the others will soon need are not for guesses.
            if self._kv.lacks_blocks(seq) and not (
                self._kv.num_available > len(self._running) and self._kv.grow(seq)
            ):
                seq.take_draft()
            placed += seq.num_draft_tokens
        return placed

    def _most_drafted(self, seq: Sequence) -> int:
        """So many that, all of them accepted and one more sampled, no limit is passed."""
        room = self.max_model_len - seq.num_tokens
        max_tokens = seq.request.params.max_tokens
        if max_tokens is not None:
            room = min(room, max_tokens - seq.num_output_tokens)
        return room - 1

    def _admit(self, share: Share, now: float) -> Iterable[Sequence]:
        """Move sequences from the waiting line to the running ones while tokens, rows and blocks last."""
        index = 0
        while share.budget > 0 and self._free_rows and index < len(self._waiting):
            seq = self._waiting[index]
            if self._whole and seq.num_lacking > share.budget:
                return  # the next step has room for it
            prefix = self._kv.find_prefix(seq)
            if prefix is None:
                index += 1  # another computes its next block: those behind may go first
                continue
            seq.row = self._free_rows[-1]
            # Each running sequence will soon need one block more: without them the newcomer would be the
            # next victim.
            headroom = 0 if self._whole else len(self._running)
            if not self._kv.admit(seq, prefix, headroom=headroom):
                seq.row = -1
                return
            self._free_rows.pop()
            del self._waiting[index]
            insort(self._running, seq, key=_by_rank)
            self._rows.fill(seq)
            self._note_start(seq, now)
            yield seq

    def _note_start(self, seq: Sequence, now: float) -> None:
        if seq.first_scheduled_time is not None:
            return
        seq.first_scheduled_time = now
        seq.num_cached_tokens = seq.num_computed_tokens
        if self._kv.prefix_caching:
            self.prefix_queries += seq.num_prompt_tokens
            self.prefix_hits += seq.num_cached_tokens
        if not seq.request.was_scheduled:
            seq.request.was_scheduled = True
            self.prompt_tokens += seq.num_prompt_tokens

    def _report(self, seq: Sequence, outcome: Outcome, now: float) -> EngineOutput | None:
        """What the step did for ``seq``: its news, if there is any."""
        tokens = outcome.tokens
        if outcome.failed:
            # Its K and V may be as broken as its logits: no block of this step becomes findable.
            self._remove(seq)
            output = seq.error_output(*why_failed(seq))
            output.token_ids, output.logprobs = tokens, outcome.logprobs
            return output
        if outcome.drafted and self._speculation is not None:
            self._speculation.note_draft(seq, outcome.drafted, outcome.accepted)
        self._kv.commit(seq)
        if not tokens:
            return None
        self.generation_tokens += len(tokens)
        is_first = seq.first_token_time is None
        if is_first:
            seq.first_token_time = now
        if outcome.finish_reason is not None:
            self._remove(seq)
        output = seq.token_output(tokens, outcome.logprobs, outcome.finish_reason)
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

    def _remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is, and its request with the last one."""
        if seq.row >= 0:
            self._kv.release(seq)
            self._running.remove(seq)
            self._free_row(seq)
        else:
            self._waiting.remove(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        request = seq.request
        del request.sequences[seq.choice]
        if not request.sequences:
            del self._requests[request.request_id]

    def _free_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = -1


def _lacks_many(seq: Sequence) -> bool:
    return seq.num_tokens - seq.num_draft_tokens - seq.num_computed_tokens > 1
