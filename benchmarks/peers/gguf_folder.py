"""A Transformers folder of the Llama family as GGUF. Run by llama.cpp's own Python, which has ``gguf``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_metadata(source: Path, writer: Any) -> None:
    """Everything but tensors; ``writer`` is a ``gguf.GGUFWriter``."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])

    described = json.loads((source / "tokenizer.json").read_text())
    tokens = [f"<unused {index}>" for index in range(config["vocab_size"])]
    kinds = [int(gguf.TokenType.UNUSED)] * len(tokens)
    for token, index in described["model"]["vocab"].items():
        tokens[index], kinds[index] = token, int(gguf.TokenType.NORMAL)
    for added in described["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[-1] if isinstance(ends, list) else ends)


def tensors(source: Path) -> Iterator[tuple[str, Any]]:
    """Names and float32 arrays as GGUF has them: rows of q and k in interleaved order."""
    import gguf
    import numpy as np

    config = json.loads((source / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for part in sorted(source.glob("*.safetensors")):
        with part.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            raw = np.fromfile(part, np.uint8, end - begin, offset=8 + length + begin)
            kind = gguf.GGMLQuantizationType["BF16" if entry["dtype"] == "BF16" else "F32"]
            values = gguf.dequantize(raw, kind).reshape(entry["shape"])
            stem = name.removesuffix(".weight")
            if stem in _TOP:
                yield f"{_TOP[stem]}.weight", values
                continue
            _, _, layer, rest = stem.split(".", 3)
            kept = _LAYER[rest]
            if kept in heads:
                rows, columns = values.shape
                halves = values.reshape(heads[kept], 2, rows // heads[kept] // 2, columns)
                values = halves.swapaxes(1, 2).reshape(rows, columns)
            yield f"blk.{layer}.{kept}.weight", values
