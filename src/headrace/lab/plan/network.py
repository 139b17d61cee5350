"""What a network weighs and works: parameters, bytes and multiply-accumulates, by architecture alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from headrace.model.architecture import Architecture, AttentionSpec
from headrace.model.weights.tensor_shapes import expected_shapes

BLOCK_TOKENS = 16  # KV is given out in blocks of so many tokens (headrace, vLLM)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's feed-forward is ``count`` experts of the architecture's width; a token uses ``active``."""

    count: int
    active: int


@dataclass(frozen=True, slots=True)
class Precision:
    """How matrices are held and multiplied; norms stay in 16 bits, and usually embedding and head do.

    ``matrix_bytes``, ``head_bytes``: bytes a weight of the layers' matrices and of embedding and head, scales
    included. ``compute``: the name of the hardware's rate that multiplies them.
    """

    name: str
    matrix_bytes: float
    compute: Literal["bf16", "fp8", "int8"]
    head_bytes: float = 2.0


BF16 = Precision("bf16", 2.0, "bf16")
FP8 = Precision("fp8", 1.0, "fp8")  # one scale a channel: nothing beside the codes
INT8 = Precision("int8", 1.0, "int8")
# 4-bit codes and one 16-bit scale for 128 weights; multiplied in bf16 after unpacking (AWQ, GPTQ kernels).
INT4 = Precision("int4", 0.5 + 2 / 128, "bf16")


@dataclass(frozen=True)
class Network:
    """A model by its description. All counts are exact for what the architecture names."""

    name: str
    architecture: Architecture
    experts: Experts | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.architecture.layers)

    def embedding_parameters(self) -> int:
        """Of the token embedding."""
        return self.architecture.vocab_size * self.architecture.hidden_size

    def head_parameters(self) -> int:
        """Of the output head, which a tied network shares with its embedding."""
        return self.embedding_parameters()

    @cached_property
    def attention_matrix_parameters(self) -> int:
        """Of q, k, v and o in all layers."""
        return self._matrix_parameters("attention.")

    @cached_property
    def expert_parameters(self) -> int:
        """Of the feed-forward in all layers, one expert's worth where there are several."""
        return self._matrix_parameters("feed_forward.")

    def router_parameters(self) -> int:
        """Of what chooses the experts."""
        return 0 if self.experts is None else self.layers * self.experts.count * self.architecture.hidden_size

    @cached_property
    def vector_parameters(self) -> int:
        """Norms and biases."""
        return sum(prod(shape) for shape in expected_shapes(self.architecture).values() if len(shape) == 1)

    def matrix_parameters(self) -> int:
        """Of the layers' matrices, all experts included."""
        copies = 1 if self.experts is None else self.experts.count
        return self.attention_matrix_parameters + copies * self.expert_parameters

    def parameters(self) -> int:
        """All of them."""
        heads = 1 if self.architecture.tied_head else 2
        return (
            self.matrix_parameters()
            + self.router_parameters()
            + self.vector_parameters
            + heads * self.embedding_parameters()
        )

    def active_matrix_parameters(self) -> int:
        """Of the layers' matrices that one token passes: its multiply-accumulates, without the head."""
        used = 1 if self.experts is None else self.experts.active
        return self.attention_matrix_parameters + used * self.expert_parameters + self.router_parameters()

    def weight_bytes(self, precision: Precision) -> int:
        """Memory that the weights take."""
        heads = 1 if self.architecture.tied_head else 2
        held = self.matrix_parameters() * precision.matrix_bytes
        held += heads * self.embedding_parameters() * precision.head_bytes
        return int(held) + 2 * (self.router_parameters() + self.vector_parameters)

    def step_weight_bytes(self, precision: Precision, rows: float) -> float:
        """Weights that a step over ``rows`` tokens reads: of experts, those that some token chose.

        With even routing, a token misses a given expert with probability 1 - active / count.
        """
        read = float(self.attention_matrix_parameters)
        if self.experts is None:
            read += self.expert_parameters
        else:
            missed = (1 - self.experts.active / self.experts.count) ** rows
            read += self.expert_parameters * self.experts.count * (1 - missed)
        other = self.head_parameters() * precision.head_bytes
        other += 2 * (self.router_parameters() + self.vector_parameters)
        return read * precision.matrix_bytes + other

    @cached_property
    def attentions(self) -> tuple[tuple[AttentionSpec, int], ...]:
        """Each kind of attention, and in how many layers it is."""
        return tuple(Counter(layer.attention for layer in self.architecture.layers).items())

    def kv_bytes_per_token(self, value_bytes: int = 2) -> int:
        """K and V of one token in all layers, while no window has passed it."""
        return sum(2 * value_bytes * spec.kv_heads * spec.head_dim * n for spec, n in self.attentions)

    def kv_bytes(self, context: int, value_bytes: int = 2) -> int:
        """What a sequence of ``context`` tokens keeps, in blocks: layers with a window no more than that."""
        total = 0
        for spec, layers in self.attentions:
            kept = -(-context // BLOCK_TOKENS) * BLOCK_TOKENS
            if spec.window is not None:  # the oldest block is let go when its last token is out of sight
                kept = min(kept, (-(-spec.window // BLOCK_TOKENS) + 1) * BLOCK_TOKENS)
            total += 2 * value_bytes * spec.kv_heads * spec.head_dim * kept * layers
        return total

    def kv_read_bytes(self, context: float, value_bytes: int = 2) -> float:
        """What attention reads for one new token at a context of ``context``."""
        return sum(
            2 * value_bytes * spec.kv_heads * spec.head_dim * min(context, spec.window or context) * layers
            for spec, layers in self.attentions
        )

    def attention_macs(self, context: float) -> float:
        """Multiply-accumulates of scores and weighted values for one token at a context of ``context``."""
        return sum(
            2 * spec.heads * spec.head_dim * min(context, spec.window or context) * layers
            for spec, layers in self.attentions
        )

    def prefill_attention_macs(self, tokens: int) -> float:
        """The same for a whole prompt: token i sees i tokens, at most a window."""
        total = 0.0
        for spec, layers in self.attentions:
            window = min(spec.window or tokens, tokens)
            seen = window * (window + 1) / 2 + (tokens - window) * window
            total += 2 * spec.heads * spec.head_dim * seen * layers
        return total

    def _matrix_parameters(self, part: str) -> int:
        return sum(
            prod(shape)
            for name, shape in expected_shapes(self.architecture).items()
            if len(shape) == 2 and f".{part}" in name
        )
