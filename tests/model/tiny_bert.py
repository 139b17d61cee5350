"""A tiny random BERT sentence encoder, saved with the files that sentence-transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests.model.tiny import randomise, save

VOCAB = 300
HIDDEN = 64
MAX_POSITIONS = 96
MAX_TOKENS = 80  # sentence_bert_config.json
CLS, SEP = 1, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "attn_implementation": "eager",
}


def tiny_bert(folder: Path, *, pooling: str = "mean", normalize: bool = True, **changes: Any) -> Any:
    """Write a whole model folder; returns the transformers model. ``changes`` are keys of BertConfig."""
    config = transformers.BertConfig(**{**_SIZES, **changes})
    model = save(randomise(transformers.BertModel(config)), folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    write_modules(folder, modules)
    write_pooling(folder, pooling)
    wordpiece(folder)
    return model


def write_json(path: Path, value: Any) -> None:
    """Write ``value``, making the folder if need be."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_modules(folder: Path, kinds: list[str]) -> None:
    """``modules.json`` with these modules."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": paths.get(kind, f"{i}_{kind}"), "type": f"a.models.{kind}"}
            for i, kind in enumerate(kinds)
        ],
    )


def write_pooling(folder: Path, *modes: str, width: int = HIDDEN) -> None:
    """``1_Pooling/config.json`` with these modes on."""
    keys = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    config: dict[str, Any] = {"word_embedding_dimension": width}
    config |= {f"pooling_mode_{key}": mode in modes for mode, key in keys.items()}
    write_json(folder / "1_Pooling" / "config.json", config)


def wordpiece(folder: Path) -> None:
    """``tokenizer.json``: letters and pairs of them; truncation and padding on, as some files have it."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *letters, *(f"##{a}" for a in letters)]
    words += [f"{a}{b}" for a in letters[:14] for b in letters[:17]][: VOCAB - len(words)]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    backend.add_special_tokens(words[:4])
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))


def reference(
    model: Any, inputs: list[list[int]], *, pooling: str = "mean", normalize: bool = True
) -> NDArray[Any]:
    """``[texts, hidden]``: what transformers computes for each text alone, pooled, in float32."""
    rows = []
    with torch.inference_mode():
        for ids in inputs:
            states = model(torch.tensor([ids])).last_hidden_state[0]
            row = states.mean(0) if pooling == "mean" else states[0]
            rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows).numpy()
