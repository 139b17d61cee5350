"""Canonical tensor names and what GGUF calls them."""

from __future__ import annotations

_OUTER = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
_INNER = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward_post_norm": "post_ffw_norm",
}


def gguf_name(canonical: str) -> str:
    """``layers.3.attention.q.weight`` to ``blk.3.attn_q.weight``, and so on."""
    stem, _, kind = canonical.rpartition(".")
    if not stem.startswith("layers."):
        return f"{_OUTER[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    return f"blk.{index}.{_INNER[inner]}.{kind}"
