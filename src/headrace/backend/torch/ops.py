"""The operations of :class:`~headrace.model.ops.Ops`, executed at once on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.torch.kv import TorchKV
from headrace.backend.torch.step import TorchStep
from headrace.model.architecture import Activation, AttentionSpec, EncoderSpec, NormSpec, RopeSpec
from headrace.model.ops import Index, Shard


class TorchOps:
    """One step's operations over ``[rows, width]`` tensors.

    ``weights`` maps canonical names with their ``.weight``/``.bias`` to tensors of the compute dtype, ``kv``
    is written and read by :meth:`attention`. Norms and softmax compute in float32 whatever the dtype.
    A single device: ``shard`` splits nothing.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], kv: TorchKV, step: TorchStep) -> None:
        self._weights = weights
        self._kv = kv
        self._step = step
        self._turns: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self.output: torch.Tensor | None = None
        """What the definition ended in: logits ``[m, vocab]`` of :meth:`sample`, for the runner to sample or
        hand out raw, or vectors ``[r, hidden]`` of :meth:`pool`."""

    def embed(self, name: str, *, scale: float, by: Index = "token") -> torch.Tensor:
        """``[n, hidden]``: rows of the table at the step's token ids or positions, times ``scale``."""
        ids = self._step.token_ids if by == "token" else self._step.positions
        rows = self._weights[f"{name}.weight"][ids]
        return rows if scale == 1.0 else rows * scale

    def norm(self, x: torch.Tensor, name: str, spec: NormSpec) -> torch.Tensor:
        """Root-mean-square or layer normalisation of every row."""
        weight = self._weights[f"{name}.weight"].float()
        wide = x.float()
        if spec.kind == "layer":
            bias = self._weights[f"{name}.bias"].float()
            return F.layer_norm(wide, wide.shape[-1:], weight, bias, spec.eps).to(x.dtype)
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + spec.eps) * weight).to(x.dtype)

    def head_norm(self, x: torch.Tensor, name: str, spec: NormSpec, *, heads: int) -> torch.Tensor:
        """Normalise each head's part of every row by itself."""
        return self.norm(_split(x, heads), name, spec).flatten(-2)

    def linear(
        self, x: torch.Tensor, name: str, *, bias: bool = False, shard: Shard = "none"
    ) -> torch.Tensor:
        """``x @ weight.T (+ bias)``."""
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"] if bias else None)

    def rope(self, x: torch.Tensor, spec: RopeSpec, *, heads: int) -> torch.Tensor:
        """Rotate the first ``spec.dim`` features of each head by its row's position (half-split form)."""
        cos, sin = self._cos_sin(spec)
        parts = _split(x, heads)
        turned, rest = parts[..., : spec.dim].float(), parts[..., spec.dim :]
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((turned.to(x.dtype), rest), -1).flatten(-2)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *, layer: int
    ) -> torch.Tensor:
        """Write ``k`` and ``v [n, kv_heads * head_dim]``, then attend per sequence over its blocks.

        Blocks that lie wholly before every query's window are not read, so their table entries may be stale.
        """
        step, group = self._step, self._kv.groups[layer]
        slots = step.slot_mapping[group]
        self._kv.write(layer, slots, _split(k, spec.kv_heads), _split(v, spec.kv_heads))
        queries = _split(q, spec.heads)
        out = torch.empty_like(queries)
        for row, context in enumerate(step.context_len):
            start, end = step.query_start[row], step.query_start[row + 1]
            if start == end:
                continue
            first = context - (end - start)  # position of the sequence's first query
            seen = 0 if spec.window is None else max(0, first - spec.window + 1)
            positions = torch.arange(seen, context, device=q.device)
            table = step.block_tables[group][row]
            slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            keys, values = self._kv.read(layer, slots)
            query_positions = torch.arange(first, context, device=q.device)[:, None]
            visible = (positions <= query_positions) | (not spec.causal)
            if spec.window is not None:
                visible &= positions > query_positions - spec.window
            out[start:end] = attend(queries[start:end], keys, values, visible, spec)
        return out.flatten(-2)

    def glu(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``activation(gate) * up``."""
        return self.activate(gate, activation) * up

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``activation(x)``."""
        if activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Elementwise sum."""
        return x + y

    def logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[m, hidden]``: the rows whose next token is wanted."""
        return x[self._step.logit_rows]

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """``cap * tanh(x / cap)``."""
        return cap * torch.tanh(x / cap)

    def sample(self, logits: torch.Tensor) -> None:
        """End the step: keep the logits for the runner."""
        self.output = logits

    def pool(self, x: torch.Tensor, spec: EncoderSpec) -> None:
        """End the step: keep one vector per sequence, in float32."""
        starts = self._step.query_start
        parts = [x[a:b].float() for a, b in pairwise(starts)]
        rows = torch.stack([part.mean(0) if spec.pooling == "mean" else part[0] for part in parts])
        self.output = F.normalize(rows, dim=-1) if spec.normalize else rows

    def _cos_sin(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """``[n, 1, dim / 2]`` each, float32; angles in float64, for positions go to the hundred thousands."""
        if spec not in self._turns:
            positions = self._step.positions
            frequencies = torch.tensor(_inverse_frequencies(spec), dtype=torch.float64)
            angles = positions.cpu().double()[:, None, None] * frequencies
            cos, sin = (angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor)
            self._turns[spec] = (cos.float().to(positions.device), sin.float().to(positions.device))
        return self._turns[spec]


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[n, width]`` as ``[n, heads, width / heads]``."""
    return x.view(len(x), heads, x.shape[1] // heads)


@lru_cache(maxsize=64)
def _inverse_frequencies(spec: RopeSpec) -> tuple[float, ...]:
    return spec.inverse_frequencies()


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Softmax attention of one sequence: ``[n, heads, d]`` over ``[c, kv_heads, d]``, ``visible [n, c]``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    if spec.softcap is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
        )
        return out[0].transpose(0, 1)
    repeats = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(-1, -2)).float() * spec.scale
    scores = spec.softcap * torch.tanh(scores / spec.softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights.to(v.dtype) @ v)[0].transpose(0, 1)
