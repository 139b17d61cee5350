"""The running sequences' sampling parameters, kept in arrays so that a step's table is a few gathers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import Int32, SamplingTable
from headrace.engine.sequence import Sequence

_Ragged = tuple[NDArray[np.int32], NDArray[Any]] | None


class SamplingRows:
    """One row of parameters for each running sequence (``Sequence.row``)."""

    def __init__(self, max_sequences: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_sequences, np.float32)
        self._top_k = np.zeros(max_sequences, np.int32)
        self._top_p = np.zeros(max_sequences, np.float32)
        self._min_p = np.zeros(max_sequences, np.float32)
        self._presence = np.zeros(max_sequences, np.float32)
        self._frequency = np.zeros(max_sequences, np.float32)
        self._repetition = np.zeros(max_sequences, np.float32)
        self._seed = np.zeros(max_sequences, np.uint64)
        self._choice = np.zeros(max_sequences, np.uint32)
        self._num_logprobs = np.zeros(max_sequences, np.int32)
        self._no_masks = np.zeros((0, -(-vocab_size // 32)), np.uint32)

    def fill(self, seq: Sequence) -> None:
        """Write the parameters of ``seq`` into its row; they stay until the row's next user."""
        row, params = seq.row, seq.request.params
        self._temperature[row] = seq.sampling_temperature()
        self._top_k[row] = min(max(params.top_k, 0), self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._repetition[row] = params.repetition_penalty
        self._seed[row] = seq.request.seed
        self._choice[row] = seq.choice
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def table(self, sampled: list[tuple[Sequence, int]]) -> SamplingTable:
        """The table for one step: a row for each sequence and position whose token is sampled in it.

        At a position of the prompt the token is known and only its log-probabilities are wanted: it is
        sampled greedily under a bias that leaves no choice.
        """
        rows = np.array([seq.row for seq, _ in sampled], np.intp)
        positions = np.array([position for _, position in sampled], np.uint32)
        temperature, num_logprobs = self._temperature[rows], self._num_logprobs[rows]
        seen: list[_Ragged] = [None] * len(sampled)
        bias: list[_Ragged] = [None] * len(sampled)
        masks_of: list[NDArray[np.uint32] | None] = [None] * len(sampled)
        for at, (seq, position) in enumerate(sampled):
            if seq.is_plain:
                continue
            if position < seq.num_prompt_tokens:
                bias[at] = seq.forced(position)
                temperature[at] = 0.0
                num_logprobs[at] = seq.request.params.prompt_logprobs or 0
            else:
                seen[at], bias[at], masks_of[at] = seq.seen(position), seq.bias(position), seq.mask(position)
        seen_start, seen_ids, seen_counts = _join(seen, np.int32)
        bias_start, bias_ids, bias_values = _join(bias, np.float32)
        mask_row, masks = self._masks(masks_of)
        return SamplingTable(
            temperature=temperature,
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            presence_penalty=self._presence[rows],
            frequency_penalty=self._frequency[rows],
            repetition_penalty=self._repetition[rows],
            seed=self._seed[rows],
            choice=self._choice[rows],
            position=positions,
            num_logprobs=num_logprobs,
            seen_start=seen_start,
            seen_ids=seen_ids,
            seen_counts=seen_counts,
            bias_start=bias_start,
            bias_ids=bias_ids,
            bias_values=bias_values,
            mask_row=mask_row,
            masks=masks,
        )

    def _masks(self, masks: list[NDArray[np.uint32] | None]) -> tuple[Int32, NDArray[np.uint32]]:
        """``(mask_row, masks)``; None allows everything."""
        mask_row = np.full(len(masks), -1, np.int32)
        filled = [mask for mask in masks if mask is not None]
        if not filled:
            return mask_row, self._no_masks
        mask_row[[mask is not None for mask in masks]] = np.arange(len(filled))
        return mask_row, np.stack(filled)


def _join(parts: list[_Ragged], value_type: type[Any]) -> tuple[Int32, Int32, NDArray[Any]]:
    """Ragged rows as ``(start, ids, values)``; None is an empty row."""
    start = np.zeros(len(parts) + 1, np.int32)
    filled = [part for part in parts if part is not None]
    if not filled:
        return start, np.zeros(0, np.int32), np.zeros(0, value_type)
    np.cumsum([0 if part is None else len(part[0]) for part in parts], out=start[1:])
    return start, np.concatenate([ids for ids, _ in filled]), np.concatenate([v for _, v in filled])
