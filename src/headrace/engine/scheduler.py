"""The one rule of scheduling: every running sequence gets as many tokens as it lacks, within a budget."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from headrace.backend.batch import Batch, StepResult
from headrace.engine.config import SchedulerConfig
from headrace.engine.grammar import Grammar
from headrace.engine.kv_cache import KVCache
from headrace.engine.request import EngineOutput, EngineRequest, TokenLogprobs
from headrace.engine.sampling_rows import SamplingRows
from headrace.engine.sequence import Request, Sequence

_by_rank = attrgetter("rank")


class Scheduler:
    """Decides who computes what in the next step, and takes in what came of the last one.

    Chunked prefill, prefix hits and preemption all follow from two numbers of a sequence (tokens known and
    tokens computed) and one order (priority, then arrival, then choice):

    - a sequence enters only with blocks for all tokens that it knows, and nobody overtakes one that waits
      for blocks;
    - when a running sequence needs a block and there is none, the last in order gives up its blocks and goes
      back to its place in the waiting line, keeping its tokens. The first in order is never the victim of
      another, so it always finishes: there is no livelock.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCache, *, vocab_size: int, max_model_len: int
    ) -> None:
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
        budget = self._config.max_num_batched_tokens
        scheduled: list[Sequence] = []
        for seq in sorted(self._running, key=_lacks_many):  # those that only lack their last token come first
            budget = _give(seq, budget, scheduled)
        for seq in self._admit(budget, now):
            budget = _give(seq, budget, scheduled)
        self._in_flight = scheduled
        return self._batch(scheduled) if scheduled else None

    def commit(self, result: StepResult, now: float) -> list[EngineOutput]:
        """Take in what the step sampled: extend sequences, publish computed blocks, end what is finished."""
        tokens, failed = result.token_ids.tolist(), result.failed.tolist()
        outputs: list[EngineOutput] = []
        row = 0
        for seq in self._in_flight:
            samples = seq.num_scheduled == seq.num_lacking
            if samples and failed[row]:
                # Its K and V may be as broken as its logits: no block of this step becomes findable.
                self._remove(seq)
                outputs.append(seq.error_output(*_why_failed(seq)))
                row += 1
                continue
            seq.num_computed_tokens += seq.num_scheduled
            self._kv.commit(seq)
            if samples:
                outputs.append(self._extend(seq, tokens[row], _logprobs(seq, result, row), now))
                row += 1
        self._in_flight = []
        return outputs

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

    def _admit(self, budget: int, now: float) -> Iterable[Sequence]:
        """Move sequences from the waiting line to the running ones while tokens, rows and blocks last."""
        index = 0
        while budget > 0 and self._free_rows and index < len(self._waiting):
            seq = self._waiting[index]
            prefix = self._kv.find_prefix(seq)
            if prefix is None:
                index += 1  # another computes its next block: those behind may go first
                continue
            seq.row = self._free_rows[-1]
            # Each running sequence will soon need one block more: without them the newcomer would be the
            # next victim.
            if not self._kv.admit(seq, prefix, headroom=len(self._running)):
                seq.row = -1
                return
            self._free_rows.pop()
            del self._waiting[index]
            insort(self._running, seq, key=_by_rank)
            self._rows.fill(seq)
            self._note_start(seq, now)
            budget -= min(seq.num_lacking, budget)
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

    def _batch(self, scheduled: list[Sequence]) -> Batch:
        rows = np.array([seq.row for seq in scheduled], np.intp)
        counts = np.array([seq.num_scheduled for seq in scheduled], np.int32)
        starts = np.array([seq.num_computed_tokens for seq in scheduled], np.int32)
        samples = np.array([seq.num_scheduled == seq.num_lacking for seq in scheduled])
        query_start = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        token_ids = np.concatenate(
            [
                seq.tokens(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled)
                for seq in scheduled
            ]
        )
        return Batch(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            context_len=starts + counts,
            slot_mapping=self._kv.slot_mapping(np.repeat(rows, counts), positions),
            block_tables=self._kv.block_tables(rows),
            logit_rows=(query_start[1:] - 1)[samples],
            sampling=self._rows.table([seq for seq in scheduled if seq.num_scheduled == seq.num_lacking]),
        )

    def _extend(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> EngineOutput:
        seq.append(token)
        self.generation_tokens += 1
        if seq.first_token_time is None:
            seq.first_token_time = now
        reason = seq.finish_reason(self.max_model_len)
        if reason is not None:
            self._remove(seq)
        return seq.token_output(token, logprobs, reason)

    def _remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is, and its request with the last one."""
        if seq.row >= 0:
            self._kv.release(seq)
            self._running.remove(seq)
            self._free_row(seq)
        else:
            self._waiting.remove(seq)
        request = seq.request
        del request.sequences[seq.choice]
        if not request.sequences:
            del self._requests[request.request_id]

    def _free_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = -1


_NOT_FINITE = "The model produced numbers that are not finite; this sequence cannot go on."
_NOTHING_LEFT = (
    "The model produced numbers that are not finite, or none for what the grammar and min_tokens allow; this "
    "sequence cannot go on."
)


def _why_failed(seq: Sequence) -> tuple[str, str]:
    """Class and message of the error of a row that could not be sampled: its grammar's, or its logits'."""
    if seq.matcher is not None and seq.matcher.error is not None:
        return "GrammarError", seq.matcher.error
    return "GenerationError", _NOT_FINITE if seq.matcher is None else _NOTHING_LEFT


def _lacks_many(seq: Sequence) -> bool:
    return seq.num_lacking > 1


def _give(seq: Sequence, budget: int, scheduled: list[Sequence]) -> int:
    """Schedule as many tokens as ``seq`` lacks and the budget allows; returns what is left of it."""
    seq.num_scheduled = min(seq.num_lacking, budget)
    if seq.num_scheduled > 0:
        scheduled.append(seq)
    return budget - seq.num_scheduled


def _logprobs(seq: Sequence, result: StepResult, row: int) -> TokenLogprobs | None:
    wanted = seq.request.params.logprobs
    if wanted is None:
        return None
    return TokenLogprobs(
        token_id=int(result.token_ids[row]),
        logprob=float(result.logprobs[row]),
        top_ids=result.top_ids[row, :wanted].tolist(),
        top_logprobs=result.top_logprobs[row, :wanted].tolist(),
    )
