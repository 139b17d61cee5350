"""The operations that network definitions are written against.

A backend implements :class:`Ops` for its own tensor type ``T`` (torch executes, cpu records a program).
Rows are the batch's tokens, their number symbolic: definitions never ask for it and never branch on data.
Weights are named, not passed: names as in ``architecture.py``, without the ``.weight``/``.bias`` suffix.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from headrace.model.architecture import Activation, AttentionSpec, EncoderSpec, NormSpec, RopeSpec

T = TypeVar("T")
Shard = Literal["none", "column", "row", "vocab"]
Index = Literal["token", "position"]


class Ops(Protocol[T]):
    """Row-wise operations on ``[rows, width]`` values."""

    def embed(self, name: str, *, scale: float, by: Index = "token") -> T:
        """Rows of an embedding table at the batch's token ids, or at its positions, times ``scale``."""
        ...

    def norm(self, x: T, name: str, spec: NormSpec) -> T:
        """Normalise every row and multiply by the named weight; ``layer`` norms add the named bias."""
        ...

    def head_norm(self, x: T, name: str, spec: NormSpec, *, heads: int) -> T:
        """Normalise each of ``heads`` equal parts of every row by itself; the weight is one part wide."""
        ...

    def linear(self, x: T, name: str, *, bias: bool = False, shard: Shard = "none") -> T:
        """``x @ weight.T (+ bias)``. ``shard`` says how tensor parallelism splits the weight.

        ``row`` includes the reduction over devices.
        """
        ...

    def rope(self, x: T, spec: RopeSpec, *, heads: int) -> T:
        """Rotate each head by its row's position (half-split form)."""
        ...

    def attention(self, q: T, k: T, v: T, spec: AttentionSpec, *, layer: int) -> T:
        """Write k and v to the layer's KV slots, then attend over each sequence's blocks."""
        ...

    def glu(self, gate: T, up: T, activation: Activation) -> T:
        """``activation(gate) * up``."""
        ...

    def activate(self, x: T, activation: Activation) -> T:
        """``activation(x)``."""
        ...

    def add(self, x: T, y: T) -> T:
        """Elementwise sum (the residual stream)."""
        ...

    def logit_rows(self, x: T) -> T:
        """Only the rows whose next token will be sampled."""
        ...

    def softcap(self, x: T, cap: float) -> T:
        """``cap * tanh(x / cap)``."""
        ...

    def sample(self, logits: T) -> None:
        """Sample each row by the batch's sampling table; ends the program."""
        ...

    def pool(self, x: T, spec: EncoderSpec) -> None:
        """Hand out one vector per sequence, pooled from its rows; ends the program."""
        ...
