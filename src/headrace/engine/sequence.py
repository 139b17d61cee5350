"""Request and Sequence: what a client asked, and each stream of tokens that comes of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE, Float32, Int32
from headrace.engine.grammar import Grammar
from headrace.engine.request import EngineOutput, EngineRequest, SamplingParams, TokenLogprobs
from headrace.engine.seen_tokens import SeenTokens
from headrace.engine.tenant import Tenant

Rank = tuple[float, int, int]
"""Urgency, arrival and choice: unique to a sequence; lower runs first."""

_GREEDY_BELOW = 1e-5
_MIN_GROWTH = 64
_FORCE = np.array([1e30], np.float32)  # above any logit, and the sum is still finite


class Request:
    """What a client asked, as far as its sequences share it. The prompt lives in the sequences."""

    __slots__ = (
        "allowed",
        "arrival_time",
        "bad_words",
        "ban_ids",
        "cache_salt",
        "deadline",
        "gather",
        "grammar",
        "max_model_len",
        "number",
        "params",
        "priority",
        "request_id",
        "restarted",
        "seed",
        "sequences",
        "stop_ids",
        "tenant",
        "urgency",
        "was_scheduled",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        number: int,
        seed: int,
        now: float,
        vocab_size: int,
        max_model_len: int = sys.maxsize,
        grammar: Grammar | None = None,
        tenant: Tenant | None = None,
        aging_s: float = 0.0,
    ) -> None:
        """``number``: place in the order of arrival. ``seed``: used when the parameters name none.

        ``grammar``: what ``params.structured_outputs`` was compiled to. ``aging_s``: the head start of one
        level of priority; 0 = one that nothing makes up for.
        """
        params = request.params
        self.request_id = request.request_id
        self.params: SamplingParams = params
        self.priority = request.priority
        self.number = number
        self.seed = (seed if params.seed is None else params.seed) & (2**64 - 1)
        self.max_model_len = max_model_len
        self.cache_salt = request.cache_salt
        self.gather = request.gather
        # A clock that runs ahead must not make a request immortal in the queue.
        self.arrival_time = min(request.arrival_time or now, now)
        # Time adds the same to all that wait, so that ages need no clock: who came earlier is ahead for good.
        self.urgency = self.priority + (self.arrival_time / aging_s if aging_s else 0.0)
        self.deadline = math.inf if params.timeout_s is None else self.arrival_time + params.timeout_s
        self.tenant = tenant or Tenant()
        eos = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset((*eos, *params.stop_token_ids))
        self.ban_ids = sorted(token for token in self.stop_ids if 0 <= token < vocab_size)
        self.bad_words = [tuple(word) for word in request.bad_word_ids]
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else _mask(allowed, vocab_size)
        self.restarted = request.restarted
        self.was_scheduled = False
        self.grammar = grammar
        said = request.output_token_ids
        prompt = np.array(request.prompt_token_ids, np.int32)
        self.sequences = {
            choice: Sequence(self, choice, prompt, (said[choice] or ()) if said else ())
            for choice in request.open_choices
        }


class Sequence:
    """One stream of tokens: the prompt and what was generated.

    The one scheduling rule rests on two numbers: ``num_tokens`` (prompt, output and, during a step, the draft
    that it verifies) and ``num_computed_tokens`` (whose K and V are in the cache). A sequence lacks the
    difference; from its last token before the draft on, each computed token has its successor sampled.
    """

    __slots__ = (
        "_bans",
        "_bias",
        "_capacity",
        "_most_tokens",
        "_seen",
        "_tokens",
        "block_keys",
        "choice",
        "commit_at",
        "first_scheduled_time",
        "first_token_time",
        "gather",
        "ids",
        "is_new",
        "is_plain",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_loaded",
        "num_loading",
        "num_logit_rows",
        "num_logprobs",
        "num_promised",
        "num_prompt_tokens",
        "num_scheduled",
        "num_slots",
        "num_tokens",
        "prompt_logprobs",
        "rank",
        "request",
        "row",
        "stop_ids",
        "tenant",
        "untold",
        "untold_logprobs",
        "waits_for",
    )

    def __init__(self, request: Request, choice: int, prompt: Int32, said: Collection[int] = ()) -> None:
        """``prompt`` is shared between a request's sequences: the first append copies it.

        ``said``: the output that a sequence which goes on has already.
        """
        self.request = request
        self.choice = choice
        self.rank: Rank = (request.urgency, request.number, choice)
        self._tokens = prompt
        self.ids = prompt.data  # its tokens as ints, one by one; until the next append
        self._capacity = len(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.num_draft_tokens = 0  # the last of num_tokens: guessed, not sampled
        self.num_scheduled = 0  # tokens in the step in flight; scheduler
        self.num_promised = 0  # prompt tokens that its tenant has not been charged for yet; waiting line
        self.num_logit_rows = 0  # of its last tokens in the step in flight; scheduler
        self.row = -1  # in the block tables and the sampling rows; scheduler; -1 = not running
        self.num_slots = 0  # tokens that its block tables cover; KVCache
        self.commit_at = 0  # computed tokens, before which KVCache.commit has nothing to do; KVCache
        self.block_keys: list[bytes] = []  # of the leading full blocks; KVCache, as far as it needed them
        self.waits_for: bytes | None = None  # block that another sequence is computing; KVCache
        self.is_new = True  # until it has been told how many of its tokens need not be computed; scheduler
        self.num_loading = 0  # tokens, behind the computed ones, that come from the second tier; KVCache
        self.num_loaded = 0  # tokens that came from there when it last entered; KVCache
        self.num_cached_tokens = 0  # prompt tokens found in either tier at first admission
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.untold: list[int] = []  # sampled, and no output has had them
        self.untold_logprobs: list[TokenLogprobs] | None = None
        params = request.params
        self.num_logprobs = params.logprobs
        self.stop_ids, self.tenant, self.gather = request.stop_ids, request.tenant, request.gather
        self._most_tokens = request.max_model_len
        if params.max_tokens is not None:
            self._most_tokens = min(len(prompt) + params.max_tokens, request.max_model_len)
        # Of the prompt's tokens from the second on, as far as computed; the first choice's stand for all.
        wanted = params.prompt_logprobs is not None and choice == 0 and not said
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self.matcher = None if request.grammar is None else request.grammar.matcher()
        self._seen: SeenTokens | None = None
        if params.repetition_penalty != 1.0:
            self._seen = SeenTokens(prompt)
        elif params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._seen = SeenTokens(prompt[:0])
        self._bias = _bias_arrays(params.logit_bias)
        banned = params.logit_bias | dict.fromkeys(request.ban_ids, -np.inf)
        self._bans = _bias_arrays(banned) if params.min_tokens > 0 else self._bias
        shaped = (self._seen, self._bias, self._bans, self.prompt_logprobs, request.allowed)
        self.is_plain = all(each is None for each in (*shaped, self.matcher)) and not request.bad_words
        for token in said:
            self.append(token)

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and output, without the draft."""
        return self.num_tokens - self.num_draft_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_lacking(self) -> int:
        """Tokens, the draft's included, whose K and V are not computed yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are still without the log-probabilities that were asked for."""
        have = self.prompt_logprobs
        return have is not None and len(have) < self.num_prompt_tokens - 1

    def tokens(self, start: int, stop: int) -> Int32:
        """A view of token ids ``start:stop``; ``stop`` is at most ``num_tokens``."""
        return self._tokens[start:stop]

    def block_tokens(self, index: int) -> bytes:
        """The tokens of a full block, as the prefix cache has them."""
        return self.ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE].tobytes()

    def append(self, token: int) -> None:
        """Add a sampled token."""
        end = self.num_tokens
        if end == self._capacity:
            self._reserve(end + 1)
        self.ids[end] = token
        self.num_tokens = end + 1
        if self._seen is not None:
            self._seen.append(token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def take(self, token: int) -> str | None:
        """Add a sampled token, to be told; no draft is placed.

        Returns why it is the last one, ``stop`` or ``length``, or None: the sequence goes on.
        """
        self.append(token)
        self.untold.append(token)
        if token in self.stop_ids:
            return "stop"  # never before min_tokens: until then these are banned
        if self.matcher is not None and self.matcher.complete:
            return "stop"  # nothing can follow, min_tokens or not
        return "length" if self.num_tokens >= self._most_tokens else None

    def place_draft(self, draft: list[int]) -> None:
        """Add guessed tokens, for one step to verify."""
        self._write(draft)
        self.num_draft_tokens = len(draft)

    def take_draft(self) -> list[int]:
        """Take the guessed tokens away again."""
        known = self.num_known_tokens
        draft: list[int] = self._tokens[known : self.num_tokens].tolist()
        self.num_tokens, self.num_draft_tokens = known, 0
        return draft

    def least_output(self, max_model_len: int) -> int:
        """So many more tokens, at least, until the sequence can end."""
        params = self.request.params
        least = max(params.min_tokens, 1)
        if params.max_tokens is not None and not (self.request.stop_ids or params.stop or self.matcher):
            least = params.max_tokens
        return max(1, min(least - self.num_output_tokens, max_model_len - self.num_known_tokens))

    # How the token at a position is sampled, given the tokens before it, drafted ones included.

    def seen(self, position: int) -> tuple[Int32, Int32] | None:
        """Distinct seen ids and their output counts, or None when no penalty needs them."""
        if self._seen is None:
            return None
        return self._seen.arrays(self._tokens[self.num_known_tokens : position].tolist())

    def bias(self, position: int) -> tuple[Int32, Float32] | None:
        """What to add to its logits: ids and values.

        -inf bans: stops before ``min_tokens``, and whatever would complete a bad word of the output.
        """
        params, request = self.request.params, self.request
        early = position - self.num_prompt_tokens < params.min_tokens
        bans = self._bad_ends(position) if request.bad_words else None
        if not bans:
            return self._bans if early else self._bias
        if early:
            bans += request.ban_ids
        return _bias_arrays(params.logit_bias | dict.fromkeys(bans, -np.inf))

    def mask(self, position: int) -> NDArray[np.uint32] | None:
        """The ids that are allowed, as a row of SamplingTable.masks; None allows all.

        Behind a drafted token that the grammar forbids None will do: nothing sampled there will count.
        """
        if self.matcher is None:
            return self.request.allowed
        drafted = self._tokens[self.num_known_tokens : position].tolist()
        mask = self.matcher.mask(allow_end=not self.request.params.ignore_eos, after=drafted)
        if mask is not None and self.request.allowed is not None:
            mask &= self.request.allowed
        return mask

    def forced(self, position: int) -> tuple[Int32, Float32]:
        """A bias under which greedy sampling gives the token that is there: a prompt token, to be scored."""
        return self._tokens[position : position + 1], _FORCE

    def sampling_temperature(self) -> float:
        """0 for temperatures too small to divide by."""
        temperature = self.request.params.temperature
        return 0.0 if temperature < _GREEDY_BELOW else temperature

    def output(self, finish_reason: str | None = None) -> EngineOutput:
        """News of this sequence: the tokens that no output has had; the last one may have ended it."""
        tokens, self.untold = self.untold, []
        logprobs, self.untold_logprobs = self.untold_logprobs, None
        stopped = finish_reason == "stop" and tokens and tokens[-1] in self.stop_ids
        return EngineOutput(
            request_id=self.request.request_id,
            choice=self.choice,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_token_id=tokens[-1] if stopped else None,
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
        )

    def error_output(self, kind: str, message: str) -> EngineOutput:
        """The end of this sequence by an error; ``kind`` is a class name in headrace.errors."""
        output = self.output("error")
        output.error_kind = kind
        output.error_message = message
        return output

    def _write(self, token_ids: list[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > self._capacity:
            self._reserve(end)
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def _reserve(self, count: int) -> None:
        """Room for ``count`` tokens and some more."""
        self._capacity = count + max(_MIN_GROWTH, count // 2)
        grown = np.empty(self._capacity, np.int32)
        grown[: self.num_tokens] = self._tokens[: self.num_tokens]
        self._tokens, self.ids = grown, grown.data

    def _bad_ends(self, position: int) -> list[int]:
        """Tokens that would complete a bad word at ``position``."""
        output = self._tokens[self.num_prompt_tokens : position]
        ends = []
        for word in self.request.bad_words:
            rest = len(word) - 1
            if rest == 0 or (rest <= len(output) and tuple(output[-rest:].tolist()) == word[:-1]):
                ends.append(word[-1])
        return ends


def _mask(allowed: list[int], vocab_size: int) -> NDArray[np.uint32]:
    """A row of SamplingTable.masks that allows these ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def _bias_arrays(bias: dict[int, float]) -> tuple[Int32, Float32] | None:
    if not bias:
        return None
    return np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
