"""Rotary embedding settings of a Hugging Face ``config.json``, old keys and new, to RopeSpec."""

from __future__ import annotations

import math

from headrace.model.architecture import RopeSpec
from headrace.model.weights.hf_keys import Keys

_SUPPORTED = "default, linear, llama3, yarn"
_MIN_FACTOR, _MAX_FACTOR = 1e-3, 1e6


def rope_from_hf(keys: Keys, *, dim: int, max_positions: int, base: float = 10000.0) -> RopeSpec:
    """The rotary embedding of a network whose layers all share one.

    ``keys``: the object that holds ``rope_parameters`` or ``rope_scaling`` beside ``rope_theta``; ``base``
    is the default of the latter. Raises ModelFormatError.
    """
    # transformers gives rope_scaling precedence where a file has both
    name = "rope_scaling" if keys.has("rope_scaling") else "rope_parameters"
    base = keys.number("rope_theta", base, low=1.0)
    _refuse_partial(keys)
    if not keys.has(name):
        return RopeSpec(base, dim)
    return rope_of_section(keys.section(name), keys, dim=dim, max_positions=max_positions, base=base)


def rope_of_section(section: Keys, outer: Keys, *, dim: int, max_positions: int, base: float) -> RopeSpec:
    """The rotary embedding of one ``rope_scaling`` or ``rope_parameters`` object.

    ``outer`` is the object around it, ``base`` the angular base where ``section`` has none.
    """
    base = section.number("rope_theta", base, low=1.0)
    _refuse_partial(section)
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(key, "default")
    if kind == "default":
        return RopeSpec(base, dim)
    if kind == "linear":
        return RopeSpec(
            base, dim, "linear", factor=section.number("factor", low=_MIN_FACTOR, high=_MAX_FACTOR)
        )
    if kind not in ("llama3", "yarn"):
        raise section.wrong(key, f"is {kind!r}, which is not supported; it must be one of {_SUPPORTED}")
    where = outer if outer.has("original_max_position_embeddings") else section
    original = where.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low = section.number("low_freq_factor")
        high = section.number("high_freq_factor")
        if high <= low:
            raise section.wrong(
                "high_freq_factor", f"must be above 'low_freq_factor' ({low:g}), not {high:g}"
            )
        return RopeSpec(
            base,
            dim,
            "llama3",
            factor=section.number("factor", low=_MIN_FACTOR, high=_MAX_FACTOR),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(section, dim=dim, base=base, max_positions=max_positions, original=original)


def _yarn(section: Keys, *, dim: int, base: float, max_positions: int, original: int) -> RopeSpec:
    if not section.flag("truncate", True):
        raise section.wrong("truncate", "is false, which is not supported; it must be true or absent")
    factor = section.number("factor", max_positions / original, low=_MIN_FACTOR, high=_MAX_FACTOR)
    fast = section.number("beta_fast", 32.0)
    slow = section.number("beta_slow", 1.0)
    if fast <= slow:
        raise section.wrong("beta_fast", f"must be above 'beta_slow' ({slow:g}), not {fast:g}")
    if section.has("attention_factor"):
        attention = section.number("attention_factor")
    elif section.has("mscale") and section.has("mscale_all_dim"):
        attention = _mscale(factor, section.number("mscale")) / _mscale(
            factor, section.number("mscale_all_dim")
        )
    else:
        attention = _mscale(factor, 1.0)
    return RopeSpec(
        base,
        dim,
        "yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention,
    )


def _mscale(factor: float, scale: float) -> float:
    """YaRN's temperature on attention logits, as a factor on cos and sin (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _refuse_partial(keys: Keys) -> None:
    share = keys.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise keys.wrong("partial_rotary_factor", f"must be 1 for this model type, not {share:g}")
