"""GGUF metadata to :class:`Architecture`. Keys as in the GGUF specification and llama.cpp's loader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from headrace.model.architecture import (
    Activation,
    Architecture,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
)
from headrace.model.weights.gguf import GGUFFile
from headrace.model.weights.gguf_cursor import format_error

ROPE_FACTORS = "rope_freqs.weight"
"""One divisor per rotary frequency: how GGUF stores Llama 3's scaling."""

_GEMMA_PERIOD = 6  # five local layers to one global; files before the key existed do not say so
_GEMMA_LOCAL_BASE = 10_000.0
_GEMMA_27B_LAYERS = (
    62  # the one size whose attention scale is not the head's (its config's query_pre_attn_scalar)
)

_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 24
_MAX_POSITIONS = 1 << 28


@dataclass(frozen=True, slots=True)
class _Family:
    """What the architecture's name implies and no key says."""

    interleaved_rope: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False  # local and global layers, post-norms, scaled embedding, gelu
    windowed: bool = False  # a sliding_window key applies (Mistral)


_FAMILIES = {
    "llama": _Family(interleaved_rope=True, windowed=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma3": _Family(qk_norm=True, gemma=True),
}


def _stretched(rope: RopeSpec) -> int:
    """The context that YaRN was fitted for; files keep the one from before it, or after it."""
    return int(rope.original_max_positions * rope.factor) if rope.scaling == "yarn" else 0


def stores_interleaved_rope(architecture: Architecture) -> bool:
    """Whether files of this family keep q and k rows permuted for interleaved rotary pairs."""
    return _FAMILIES[architecture.family].interleaved_rope


def read_architecture(file: GGUFFile) -> Architecture:
    """The network that the file describes.

    Raises ModelFormatError, naming the key, where it is missing, of the wrong type, out of range or
    beyond what headrace runs.
    """
    return _Reader(file).architecture()


class _Reader:
    """Metadata of one file, read with the family's prefix and checked as it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        if "general.architecture" not in file.metadata:
            self._fail("it has no general.architecture: it is no language model, or is damaged")
        name = file.metadata["general.architecture"]
        if not isinstance(name, str) or name not in _FAMILIES:
            self._fail(f"its architecture is {name!r}; headrace runs {', '.join(_FAMILIES)}")
        self._name = name
        self._family = _FAMILIES[name]

    def architecture(self) -> Architecture:
        self._refuse_what_is_beyond_us()
        hidden = self._integer("embedding_length", _MAX_WIDTH)
        count = self._integer("block_count", _MAX_LAYERS)
        positions = self._integer("context_length", _MAX_POSITIONS)
        heads = self._per_layer("attention.head_count", count)
        kv_heads = self._per_layer("attention.head_count_kv", count, default=heads)
        widths = self._per_layer("feed_forward_length", count)
        head_dim = self._head_dim(hidden, heads[0])
        norm = NormSpec("rms", self._number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0))
        windows = self._windows(count, positions)
        rope, local_rope = self._ropes(head_dim, positions)
        scale = 1 / math.sqrt(head_dim)
        if self._family.gemma and count == _GEMMA_27B_LAYERS:
            scale = 1 / math.sqrt(hidden / heads[0])
        softcap = self._optional("attn_logit_softcapping")
        activation: Activation = "gelu_tanh" if self._family.gemma else "silu"
        groups: dict[tuple[int, int | None], int] = {}
        layers = []
        for index in range(count):
            if heads[index] % kv_heads[index]:
                self._fail(
                    f"layer {index} has {heads[index]} heads, no multiple of {kv_heads[index]} kv heads"
                )
            window = windows[index]
            attention = AttentionSpec(
                heads=heads[index],
                kv_heads=kv_heads[index],
                head_dim=head_dim,
                rope=rope if window is None or not self._family.gemma else local_rope,
                scale=scale,
                window=window,
                qk_norm=norm if self._family.qk_norm else None,
                softcap=softcap,
                qkv_bias=self._family.qkv_bias or self._has("attn_q.bias"),
                out_bias=self._has("attn_output.bias"),
            )
            feed_forward = FeedForwardSpec(widths[index], activation, bias=self._has("ffn_down.bias"))
            group = groups.setdefault((kv_heads[index], window), len(groups))
            layers.append(LayerSpec(attention, feed_forward, norm, self._family.gemma, group))
        return Architecture(
            family=self._name,
            vocab_size=self._vocab_size(),
            hidden_size=hidden,
            max_positions=min(max(positions, _stretched(rope)), _MAX_POSITIONS),
            layers=tuple(layers),
            final_norm=norm,
            tied_head="output.weight" not in self._file.tensors,
            embedding_scale=math.sqrt(hidden) if self._family.gemma else 1.0,
            logit_softcap=self._optional("final_logit_softcapping"),
        )

    def _refuse_what_is_beyond_us(self) -> None:
        parts = self._file.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            self._fail(f"it is one of {parts} parts; merge them first (llama-gguf-split --merge)")
        if self._scalar("expert_count") not in (None, 0):
            self._fail("it is a mixture of experts, which headrace does not run")
        if self._scalar("attention.causal") is False:
            self._fail("its attention is not causal: it is an encoder, which headrace does not generate with")

    def _head_dim(self, hidden: int, heads: int) -> int:
        if self._scalar("attention.key_length") is None and hidden % heads:
            self._fail(
                f"embedding_length {hidden} is no multiple of attention.head_count {heads}, and there is no "
                "attention.key_length"
            )
        key = self._integer("attention.key_length", _MAX_WIDTH, default=hidden // heads)
        value = self._integer("attention.value_length", _MAX_WIDTH, default=key)
        if key != value:
            self._fail(
                f"attention.key_length {key} and value_length {value} differ, which headrace does not run"
            )
        return key

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            self._fail("tensor token_embd.weight is missing")
        size = self._integer("vocab_size", 1 << 31, default=embedding.shape[0])
        tokens = self._file.metadata.array_length("tokenizer.ggml.tokens")
        if tokens is not None and tokens > size:
            self._fail(f"its tokenizer has {tokens} tokens, but its vocabulary only {size}")
        return size

    def _windows(self, count: int, positions: int) -> list[int | None]:
        """The sliding window of each layer; None where a layer sees everything."""
        window: int | None = None
        if self._family.gemma or (self._family.windowed and self._scalar("attention.sliding_window")):
            window = self._integer("attention.sliding_window", 1 << 31)
        if not self._family.gemma:
            return [None if window is None or window >= positions else window] * count
        pattern = self._get("attention.sliding_window_pattern", _GEMMA_PERIOD)
        if isinstance(pattern, np.ndarray):
            if pattern.dtype != np.bool_ or len(pattern) != count:
                self._fail(f"attention.sliding_window_pattern must have one bool for each of {count} layers")
            return [window if local else None for local in pattern.tolist()]
        period = self._integer("attention.sliding_window_pattern", 1 << 31, default=_GEMMA_PERIOD)
        return [window if index % period < period - 1 else None for index in range(count)]

    def _ropes(self, head_dim: int, positions: int) -> tuple[RopeSpec, RopeSpec]:
        """The rotary embedding of ordinary layers, and that of Gemma's local ones (never scaled)."""
        dim = self._integer("rope.dimension_count", _MAX_WIDTH, default=head_dim)
        if dim > head_dim or dim % 2:
            self._fail(f"rope.dimension_count {dim} must be even and at most the head's {head_dim}")
        base = self._number("rope.freq_base", low=1.0, high=1e12, default=10_000.0)
        local_base = self._number("rope.freq_base_swa", low=1.0, high=1e12, default=_GEMMA_LOCAL_BASE)
        factors = self._rope_factors(dim)
        plain, local = RopeSpec(base, dim, factors=factors), RopeSpec(local_base, dim)
        factor = self._optional("rope.scaling.factor") or self._optional("rope.scale_linear") or 1.0
        kind = self._scalar("rope.scaling.type", "linear")  # llama.cpp's default, harmless without a factor
        if kind == "none" or factor == 1.0:
            return plain, local
        if kind == "linear":
            return RopeSpec(base, dim, "linear", factor, factors=factors), local
        if kind != "yarn":
            self._fail(f"rope.scaling.type is {kind!r}; headrace knows none, linear and yarn")
        if factor < 1:
            self._fail(f"metadata key {self._name}.rope.scaling.factor is {factor}; yarn extends: 1 or more")
        if self._number("rope.scaling.yarn_ext_factor", low=0.0, high=1e6, default=1.0) != 1.0:
            self._fail("rope.scaling.yarn_ext_factor is not 1, which headrace does not run")
        attention_factor = 1 + 0.1 * math.log(factor)
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            attention_factor *= self._number(key, low=0.0, high=1e6, default=1.0)
        yarn = RopeSpec(
            base,
            dim,
            "yarn",
            factor,
            original_max_positions=self._integer(
                "rope.scaling.original_context_length", _MAX_POSITIONS, default=positions
            ),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", low=0.0, high=1e6, default=32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", low=0.0, high=1e6, default=1.0),
            attention_factor=attention_factor,
            factors=factors,
        )
        return yarn, local

    def _rope_factors(self, dim: int) -> tuple[float, ...]:
        info = self._file.tensors.get(ROPE_FACTORS)
        if info is None:
            return ()
        if info.type.name != "F32" or info.shape != (dim // 2,):
            self._fail(
                f"tensor {ROPE_FACTORS} is {info.type.name} {list(info.shape)}; "
                f"it must hold one F32 for each of {dim // 2} rotary pairs"
            )
        factors = np.asarray(self._file.tensor(ROPE_FACTORS), dtype=np.float64)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            self._fail(f"tensor {ROPE_FACTORS} must hold positive numbers")
        return tuple(factors.tolist())

    # Access to keys: present, of the right type, in range.

    def _fail(self, what: str) -> NoReturn:
        raise format_error(self._file.path, what)

    def _has(self, tensor: str) -> bool:
        return f"blk.0.{tensor}" in self._file.tensors

    def _get(self, key: str, default: object = None) -> object:
        return self._file.metadata.get(f"{self._name}.{key}", default)

    def _scalar(self, key: str, default: object = None) -> object:
        value = self._get(key, default)
        if isinstance(value, np.ndarray | list):
            self._fail(f"metadata key {self._name}.{key} is an array; it must be a single value")
        return value

    def _required(self, key: str, default: object) -> object:
        value = self._scalar(key, default)
        if value is None:
            self._fail(f"metadata key {self._name}.{key} is missing")
        return value

    def _integer(self, key: str, most: int, *, default: int | None = None) -> int:
        """A whole number from 1 to ``most``."""
        value = self._required(key, default)
        if type(value) is not int or not 1 <= value <= most:
            self._fail(
                f"metadata key {self._name}.{key} is {value!r}; it must be a whole number, 1 to {most}"
            )
        return value

    def _number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """A number above ``low`` and at most ``high``."""
        value = self._required(key, default)
        if isinstance(value, int | float) and type(value) is not bool and low < float(value) <= high:
            return float(value)
        self._fail(
            f"metadata key {self._name}.{key} is {value!r}; it must be a number above {low:g}, up to {high:g}"
        )

    def _optional(self, key: str) -> float | None:
        """A positive number; absent or zero means that there is none."""
        return None if self._scalar(key) in (None, 0) else self._number(key, low=0.0, high=1e6)

    def _per_layer(self, key: str, count: int, *, default: list[int] | None = None) -> list[int]:
        """A whole number for each of ``count`` layers, given once for all or as an array."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray):
            return [self._integer(key, _MAX_WIDTH)] * count
        values = value.tolist()
        if (
            value.dtype.kind not in "iu"
            or len(values) != count
            or not all(1 <= v <= _MAX_WIDTH for v in values)
        ):
            self._fail(
                f"metadata key {self._name}.{key} must have a whole number, 1 to {_MAX_WIDTH}, "
                f"for each of {count} layers"
            )
        return [int(v) for v in values]
