"""One frozen description of a network. Readers turn HF ``config.json`` and GGUF metadata into it.

There is no class per model: a model is a value of :class:`Architecture`, and ``decoder.py`` or, where
``Architecture.encoder`` is set, ``encoder.py`` runs any of them.

Canonical tensor names (what a :class:`~headrace.model.checkpoint.Checkpoint` answers to), linear weights
are ``[out, in]``::

    embed.weight                                  [vocab, hidden]
    layers.{i}.attention_norm.weight              before attention
    layers.{i}.attention.{q,k,v,o}.weight|bias
    layers.{i}.attention.{q,k}_norm.weight        [head_dim], when AttentionSpec.qk_norm
    layers.{i}.attention_post_norm.weight         when LayerSpec.post_norms
    layers.{i}.feed_forward_norm.weight           before the feed-forward
    layers.{i}.feed_forward.{gate,up,down}.weight|bias
    layers.{i}.feed_forward_post_norm.weight      when LayerSpec.post_norms
    final_norm.weight
    head.weight                                   absent when Architecture.tied_head: embed.weight serves

Encoders have neither final norm nor head, no ``gate``, norms after each residual addition, and besides::

    position_embed.weight                         [max_positions, hidden]; readers add token type 0 to it
    embed_norm.weight|bias

Conventions: rotary embedding is always the half-split ("NeoX") form, so readers un-permute GGUF ``llama``
q/k rows; norm weights multiply directly, so readers of HF Gemma add the 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first ``dim`` features of each head (half-split form)."""

    base: float
    dim: int
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    factors: tuple[float, ...] = ()  # dim // 2 divisors of the plain frequencies, applied before scaling

    def inverse_frequencies(self) -> tuple[float, ...]:
        """``dim // 2`` angular frequencies in radians per position, scaling applied (float64).

        Sources: RoFormer (arXiv 2104.09864); Llama 3.1's wavelength-dependent factor;
        YaRN (arXiv 2309.00071).
        """
        half = self.dim // 2
        plain = [self.base ** (-2.0 * i / self.dim) for i in range(half)]
        if self.factors:
            plain = [f / factor for f, factor in zip(plain, self.factors, strict=True)]
        if self.scaling == "none":
            return tuple(plain)
        if self.scaling == "linear":
            return tuple(f / self.factor for f in plain)
        if self.scaling == "llama3":
            out = []
            for f in plain:
                turns = self.original_max_positions * f / (2 * math.pi)
                if turns <= self.low_freq_factor:
                    out.append(f / self.factor)
                elif turns >= self.high_freq_factor:
                    out.append(f)
                else:
                    smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
                    out.append((1 - smooth) * f / self.factor + smooth * f)
            return tuple(out)

        def correction(turns: float) -> float:
            ratio = self.original_max_positions / (turns * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(self.base))

        low = max(math.floor(correction(self.beta_fast)), 0)
        high = min(math.ceil(correction(self.beta_slow)), self.dim - 1)
        out = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            out.append(f / self.factor * ramp + f * (1 - ramp))
        return tuple(out)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Root-mean-square or layer normalisation over the last axis."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention. ``window`` counts the tokens a query sees, itself included.

    Not ``causal``: every token sees its whole sequence, all of which must be in the step.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float
    window: int | None = None
    qk_norm: NormSpec | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    causal: bool = True


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` if not ``gated``."""

    width: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer; ``post_norms`` also normalises each branch before its residual addition (Gemma)."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    post_norms: bool = False
    kv_group: int = 0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV blocks live and die together (same window, same shape of a slot)."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What an encoder makes of a sequence: one vector, pooled from its rows (``cls``: the first row).

    ``max_tokens``: how long its author meant texts to be; the position table may hold more.
    """

    pooling: Literal["mean", "cls"]
    normalize: bool  # to Euclidean length one
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything about a network but its weights. ``family`` is informative (``llama``, ``gemma3`` …)."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec  # of an encoder: the norm of its embeddings
    tied_head: bool
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    encoder: EncoderSpec | None = None  # None: a decoder, which generates

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups in index order; every layer of a group has the same slot shape."""
        members: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.kv_group, []).append(index)
        groups = []
        for number in sorted(members):
            spec = self.layers[members[number][0]].attention
            groups.append(KVGroup(tuple(members[number]), spec.kv_heads, spec.head_dim, spec.window))
        return tuple(groups)
