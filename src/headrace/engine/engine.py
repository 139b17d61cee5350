"""Engine: schedule, run, commit. Not thread-safe: one thread owns it (see ``loop.py``)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.runner import Runner, RunnerSettings
from headrace.engine.config import SchedulerConfig
from headrace.engine.drafter import Drafter
from headrace.engine.grammar import Grammar
from headrace.engine.kv_cache import KVCache
from headrace.engine.kv_tier import KVTier
from headrace.engine.request import EngineOutput, EngineRequest, EngineStats
from headrace.engine.scheduler import Scheduler
from headrace.engine.validate import EngineLimits
from headrace.errors import InvalidRequestError

_NAP_S = 0.005  # while all there is to do is to wait for the second tier


class Engine:
    """Turns requests into tokens, or texts into vectors, step by step.

    ``settings`` are those the runner was opened with. ``seed`` starts the generator that seeds requests
    without a seed of their own; None takes it from the operating system. ``clock``: seconds; requests'
    arrival times are read off the same one. ``drafter``: who guesses, and closes with the engine; None = as
    ``config.speculative`` says, which then asks for prompt lookup or nothing. ``tier``: where blocks of
    ``runner`` go that must give way; it closes with the engine.
    """

    def __init__(
        self,
        runner: Runner,
        settings: RunnerSettings,
        config: SchedulerConfig,
        *,
        prefix_caching: bool = True,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        tier: KVTier | None = None,
    ) -> None:
        architecture = runner.architecture
        pool_tokens = settings.num_blocks * BLOCK_SIZE
        for count, group in zip(settings.group_blocks, architecture.kv_groups, strict=False):
            usable = count if group.window is None else count - 1  # one of those stays empty
            pool_tokens = min(pool_tokens, usable * BLOCK_SIZE)
        self.runner = runner
        self.limits = EngineLimits(
            vocab_size=architecture.vocab_size,
            max_model_len=min(settings.max_model_len, pool_tokens),
            pool_tokens=pool_tokens,
            max_waiting=config.max_waiting,
            embeds=architecture.encoder is not None,
        )
        self.kv_cache = KVCache(
            num_blocks=settings.num_blocks,
            num_groups=len(architecture.kv_groups),
            max_sequences=settings.max_sequences,
            max_model_len=self.limits.max_model_len,
            # An encoder's K and V depend on what follows: no text can use another's.
            prefix_caching=prefix_caching and not self.limits.embeds,
            windows=tuple(group.window for group in architecture.kv_groups),
            group_blocks=settings.group_blocks,
            tier=tier,
        )
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            vocab_size=architecture.vocab_size,
            max_model_len=self.limits.max_model_len,
            max_logit_rows=settings.max_logit_rows,
            whole=self.limits.embeds,
            drafter=drafter,
            cost=None if tier is None else tier.step_cost,
            clock=clock,
        )
        self._clock = clock
        self._seeds = random.Random(seed)
        self._num_steps = 0
        self._step_seconds = 0.0
        self._batch_tokens = 0
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return self.scheduler.num_running > 0 or self.scheduler.num_waiting > 0

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        """Queue a request; ``grammar`` is what its ``structured_outputs`` were compiled to.

        Raises InvalidRequestError, ContextLengthError or OverloadedError.
        """
        self.limits.check_request(request)
        if request.request_id in self.scheduler:
            raise InvalidRequestError(
                f"A request {request.request_id!r} is under way already.", param="request_id"
            )
        self.limits.check_queue(self.scheduler.num_waiting)
        self.enqueue(request, grammar)

    def enqueue(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        """Queue a request that has passed the checks of :meth:`add` elsewhere."""
        self.scheduler.add(request, seed=self._seeds.getrandbits(64), now=self._clock(), grammar=grammar)

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        """End a request, or one of its sequences, and free its blocks. Unknown ones are ignored."""
        return self.scheduler.abort(request_id, choice)

    def step(self) -> list[EngineOutput]:
        """Advance every running sequence; returns the news of all that sampled a token or ended."""
        start = self._clock()
        outputs = self.scheduler.expire(start)
        batch = self.scheduler.schedule(start)
        if batch is None:
            if self.kv_cache.tier is not None:
                self.kv_cache.tier.wait(_NAP_S)
            return outputs
        started = self._clock()
        result = self.runner.run(batch)
        end = self._clock()
        outputs += self.scheduler.commit(result, end, end - started)
        self._num_steps += 1
        self._batch_tokens += len(batch.token_ids)
        self._step_seconds += self._clock() - start
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot."""
        scheduler, kv_cache = self.scheduler, self.kv_cache
        return EngineStats(
            num_running_seqs=scheduler.num_running,
            num_waiting_seqs=scheduler.num_waiting,
            num_blocks=kv_cache.num_blocks,
            num_free_blocks=kv_cache.num_free,
            kv_cache_usage=kv_cache.usage,
            prefix_cache_queries=scheduler.entries.prefix_queries,
            prefix_cache_hits=scheduler.entries.prefix_hits,
            prompt_tokens=scheduler.entries.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            preemptions_swapped=scheduler.entries.swapped,
            preemptions_recomputed=scheduler.entries.recomputed,
            **self._tier_stats(),
            deadlines_missed=scheduler.deadlines_missed,
            deadlines_refused=scheduler.deadlines_refused,
            num_tenants=scheduler.num_tenants,
            step_token_budget=scheduler.step_budget,
            **self._draft_stats(),
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            batch_tokens=self._batch_tokens,
        )

    def _draft_stats(self) -> dict[str, Any]:
        speculation = self.scheduler.speculation
        if speculation is None:
            return {}
        return {
            "draft_seconds": speculation.seconds,
            "draft_tokens": speculation.draft_tokens,
            "draft_tokens_accepted": speculation.accepted_tokens,
            "draft_tokens_per_position": list(speculation.drafted_per_position),
            "draft_tokens_accepted_per_position": list(speculation.accepted_per_position),
        }

    def _tier_stats(self) -> dict[str, Any]:
        tier = self.kv_cache.tier
        if tier is None:
            return {}
        return {
            "num_tier_blocks": tier.num_blocks,
            "num_tier_blocks_used": tier.num_used,
            "tier_hits": tier.counts.hits,
            "tier_spills": tier.counts.spills,
            "tier_failures": tier.counts.failures,
            "tier_read_bytes": tier.counts.read_bytes,
            "tier_written_bytes": tier.counts.written_bytes,
        }

    def close(self, *, save: bool = True) -> None:
        """Release the runner, the drafter's and the second tier. Closing twice is fine.

        ``save``: the cached blocks go to the second tier first, if that outlives the engine.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if save:
                self.kv_cache.save()
        finally:
            if self.kv_cache.tier is not None:
                self.kv_cache.tier.close()
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.close()
            self.runner.close()
