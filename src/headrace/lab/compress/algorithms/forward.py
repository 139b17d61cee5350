"""Runs one layer of the network over all calibration sequences, whole and without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from headrace.backend.torch.device import to_torch
from headrace.backend.torch.kv import TorchKV
from headrace.backend.torch.ops import TorchOps, attend
from headrace.backend.torch.step import TorchStep
from headrace.errors import GenerationError
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.algorithms.statistics import KEYS, VALUES
from headrace.model.architecture import Architecture, AttentionSpec
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import decode_layer
from headrace.model.ops import Shard
from headrace.model.quant_tensor import QuantTensor

CHUNK_ROWS = 2048  # rows that go through a layer at a time
_LOGIT_ROWS = 32  # of each stream: a vocabulary wide
See = Callable[[str, torch.Tensor], None]


class SequenceOps(TorchOps):
    """Operations over whole sequences that lie one after the other; ``see`` is told of linear inputs, and of
    keys and values as a cache would hold them."""

    def __init__(self, weights: Weights, step: TorchStep, see: See | None) -> None:
        super().__init__(weights, TorchKV((), 0), step)
        self._see = see

    def linear(
        self, x: torch.Tensor, name: str, *, bias: bool = False, shard: Shard = "none"
    ) -> torch.Tensor:
        if self._see is not None:
            self._see(name, x)
        return super().linear(x, name, bias=bias, shard=shard)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *, layer: int
    ) -> torch.Tensor:
        """Each sequence attends to itself alone: nothing is padded, so nothing has to be masked out."""
        if self._see is not None:
            self._see(f"layers.{layer}.{KEYS}", k)
            self._see(f"layers.{layer}.{VALUES}", v)
        parts = []
        for start, end in zip(self._step.query_start, self._step.query_start[1:], strict=False):
            count = end - start
            at = torch.arange(count)
            visible = at <= at[:, None]
            if spec.window is not None:
                visible &= at > at[:, None] - spec.window
            queries = q[start:end].view(count, spec.heads, spec.head_dim)
            keys = k[start:end].view(count, spec.kv_heads, spec.head_dim)
            values = v[start:end].view(count, spec.kv_heads, spec.head_dim)
            parts.append(attend(queries, keys, values, visible, spec).flatten(-2))
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the sequences lie among the rows of a residual stream, in chunks of whole sequences."""

    lengths: tuple[int, ...]

    @property
    def count(self) -> int:
        """Rows in all."""
        return sum(self.lengths)

    def chunks(self) -> Iterator[tuple[slice, TorchStep]]:
        """Sequences of about CHUNK_ROWS rows together, and the step that runs them."""
        begin = 0
        held: list[int] = []
        for length in self.lengths:
            if held and sum(held) + length > CHUNK_ROWS:
                yield _chunk(begin, held)
                begin, held = begin + sum(held), []
            held.append(length)
        yield _chunk(begin, held)


def _chunk(begin: int, lengths: Sequence[int]) -> tuple[slice, TorchStep]:
    step = whole_sequences(lengths)
    return slice(begin, begin + step.query_start[-1]), step


def whole_sequences(lengths: Sequence[int], token_ids: torch.Tensor | None = None) -> TorchStep:
    """The step of sequences of these lengths, one after the other, each from its first token on.

    ``token_ids [rows]``: for who embeds them.
    """
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths])
    none = torch.empty(0, dtype=torch.int64)
    ids = none if token_ids is None else token_ids
    return TorchStep(ids, positions, starts, list(lengths), (), (), none)


def head_name(architecture: Architecture) -> str:
    """The canonical name, without ``.weight``, of the matrix that makes logits."""
    return "embed" if architecture.tied_head else "head"


def head_logits(architecture: Architecture, weights: Weights, stream: torch.Tensor) -> torch.Tensor:
    """``[rows, vocab]`` of rows of the residual stream behind the last layer.

    ``weights``: by canonical name; the final norm and the head are looked up.
    """
    ops = SequenceOps(weights, whole_sequences([len(stream)]), None)
    normed = ops.norm(stream, "final_norm", architecture.final_norm)
    logits = ops.linear(normed, head_name(architecture))
    cap = architecture.logit_softcap
    return logits if cap is None else ops.softcap(logits, cap)


def embed(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The residual stream before the first layer, float32 ``[rows, hidden]``; reads only rows it needs."""
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    used, place = torch.unique(ids, return_inverse=True)
    table = checkpoint.tensor("embed.weight")
    rows = used.numpy()
    taken = table.take_rows(rows) if isinstance(table, QuantTensor) else table[rows]
    return (
        to_torch(taken, torch.float32, torch.device("cpu"))[place] * checkpoint.architecture.embedding_scale
    )


def load_layer(checkpoint: Checkpoint, index: int) -> Weights:
    """The layer's tensors in float32, by name without ``layers.{i}.``."""
    prefix = f"layers.{index}."
    return {
        name.removeprefix(prefix): to_torch(checkpoint.tensor(name), torch.float32, torch.device("cpu"))
        for name in sorted(checkpoint.names())
        if name.startswith(prefix)
    }


def run_layer(
    architecture: Architecture,
    index: int,
    weights: Weights,
    hidden: torch.Tensor,
    rows: Rows,
    see: See | None,
) -> torch.Tensor:
    """The residual stream after layer ``index``. Raises GenerationError if it is not finite any more."""
    named = {f"layers.{index}.{name}": tensor for name, tensor in weights.items()}
    out = torch.empty_like(hidden)
    for where, step in rows.chunks():
        ops = SequenceOps(named, step, see)
        out[where] = decode_layer(ops, hidden[where], architecture.layers[index], index)
        if not bool(torch.isfinite(out[where]).all()):
            culprit = _first_not_finite(architecture, index, named, hidden[where], step)
            raise GenerationError(
                f"Layer {index} gives values that are not finite, {culprit}: its weights are damaged, or its "
                "computation overflows in float32. Nothing can be calibrated on it."
            )
    return out


def log_probs(checkpoint: Checkpoint, streams: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Log-softmax rows ``[some, vocab]`` of several last layers' outputs, a few rows of each at a time."""
    architecture = checkpoint.architecture
    wanted = ("final_norm.", f"{head_name(architecture)}.")
    weights = {
        name: to_torch(checkpoint.tensor(name), torch.float32, torch.device("cpu"))
        for name in checkpoint.names()
        if name.startswith(wanted)
    }
    for start in range(0, len(streams[0]), _LOGIT_ROWS):
        rows = slice(start, start + _LOGIT_ROWS)
        yield [head_logits(architecture, weights, stream[rows]).log_softmax(-1) for stream in streams]


def _first_not_finite(
    architecture: Architecture, index: int, named: Weights, hidden: torch.Tensor, step: TorchStep
) -> str:
    """Where it begins: a weight, or the input of one."""
    for name, tensor in named.items():
        if not bool(torch.isfinite(tensor).all()):
            return f"and its {name} holds some already"
    bad: list[str] = []

    def look(name: str, x: torch.Tensor) -> None:
        if not bool(torch.isfinite(x).all()) and not name.endswith((KEYS, VALUES)):
            bad.append(name)

    decode_layer(SequenceOps(named, step, look), hidden, architecture.layers[index], index)
    return f"first in the input of {bad[0]}" if bad else "first in its output"
