"""BERT sentence encoders: Hugging Face ``config.json`` and the modules that sentence-transformers adds.

``modules.json`` lists what follows the network: pooling, perhaps normalisation. A folder without it is pooled
by the mean and not normalised, as sentence-transformers treats it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal

from headrace.errors import ModelFormatError
from headrace.model.architecture import (
    Architecture,
    AttentionSpec,
    EncoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
)
from headrace.model.weights.hf_keys import ACTIVATIONS, Keys
from headrace.model.weights.json_file import read_json, read_json_list

PREFIXES = ("", "bert.", "0.auto_model.")
EMBEDDING = "embeddings.word_embeddings.weight"
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
LAYERS = "encoder.layer."

_TOP = {
    "embed": "embeddings.word_embeddings",
    "position_embed": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
_PARTS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def hf_name(name: str) -> str:
    """The Hugging Face name, without the model's prefix, of a canonical one."""
    part, kind = name.rsplit(".", 1)
    if not name.startswith("layers."):
        return f"{_TOP[part]}.{kind}"
    _, index, rest = part.split(".", 2)
    return f"{LAYERS}{index}.{_PARTS[rest]}.{kind}"


def bert_architecture(keys: Keys) -> Architecture:
    """The encoder that a ``config.json`` of ``model_type`` bert describes; pooled by the mean.

    Raises ModelFormatError, naming the key, for what is missing, malformed or not implemented.
    """
    for key in ("is_decoder", "add_cross_attention"):
        if keys.flag(key, False):
            raise keys.wrong(key, "is true: only encoders of the BERT family are supported")
    positions = keys.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise keys.wrong("position_embedding_type", f"is {positions!r}; only 'absolute' is supported")
    act_name = keys.text("hidden_act", "gelu")
    if act_name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise keys.wrong("hidden_act", f"is {act_name!r}, which is not supported; it must be one of {known}")
    hidden = keys.integer("hidden_size", 768, high=2**20)
    heads = keys.integer("num_attention_heads", 12, high=2**16)
    if hidden % heads:
        raise keys.wrong(
            "hidden_size", f"must be a multiple of 'num_attention_heads' ({heads}); {hidden} is not"
        )
    head_dim = hidden // heads
    norm = NormSpec("layer", keys.number("layer_norm_eps", 1e-12, high=1.0))
    layer = LayerSpec(
        attention=AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            rope=None,
            scale=head_dim**-0.5,
            qkv_bias=True,
            out_bias=True,
            causal=False,
        ),
        feed_forward=FeedForwardSpec(
            width=keys.integer("intermediate_size", 3072, high=2**24),
            activation=ACTIVATIONS[act_name],
            bias=True,
            gated=False,
        ),
        norm=norm,
    )
    max_positions = keys.integer("max_position_embeddings", 512)
    return Architecture(
        family="bert",
        vocab_size=keys.integer("vocab_size", 30522, high=2**24),
        hidden_size=hidden,
        max_positions=max_positions,
        layers=(layer,) * keys.integer("num_hidden_layers", 12, high=4096),
        final_norm=norm,
        tied_head=True,
        encoder=EncoderSpec("mean", normalize=False, max_tokens=max_positions),
    )


def with_sentence_modules(architecture: Architecture, folder: Path) -> Architecture:
    """``architecture`` with pooling, normalisation and text length as the folder's modules say.

    Raises ModelFormatError for modules that are not implemented, or whose files are missing or malformed.
    """
    encoder = architecture.encoder
    if encoder is None:
        return architecture
    lengths = folder / "sentence_bert_config.json"
    if lengths.is_file():
        keys = Keys(read_json(lengths), file=lengths.name)
        if keys.flag("do_lower_case", False):
            raise keys.wrong("do_lower_case", "is true; lower-casing must be left to tokenizer.json")
        longest = keys.integer("max_seq_length", architecture.max_positions)
        encoder = replace(encoder, max_tokens=min(longest, architecture.max_positions))
    if (folder / "modules.json").is_file():
        encoder = _through_modules(encoder, architecture.hidden_size, folder)
    return replace(architecture, encoder=encoder)


def _through_modules(encoder: EncoderSpec, hidden: int, folder: Path) -> EncoderSpec:
    kinds = []
    for index, item in enumerate(read_json_list(folder / "modules.json")):
        keys = Keys(item, f"{index}.", file="modules.json")
        kind = keys.text("type").rsplit(".", 1)[-1]
        kinds.append(kind)
        if kind == "Pooling":
            encoder = replace(encoder, pooling=_pooling(keys, hidden, folder))
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelFormatError(
            f"modules.json: the modules are {', '.join(kinds) or 'none'}; only Transformer, Pooling and, "
            "after them, Normalize are supported."
        )
    return replace(encoder, normalize=kinds[-1] == "Normalize")


def _pooling(module: Keys, hidden: int, folder: Path) -> Literal["mean", "cls"]:
    path = PurePosixPath(module.text("path"))
    if path.is_absolute() or ".." in path.parts:
        raise module.wrong("path", "must lie inside of the model's folder")
    keys = Keys(read_json(folder / path / "config.json"), file=f"{path}/config.json")
    width = keys.integer("word_embedding_dimension", hidden)
    if width != hidden:
        raise keys.wrong("word_embedding_dimension", f"is {width}, but the model's vectors have {hidden}")
    modes = {
        "cls": keys.flag("pooling_mode_cls_token", False),
        "mean": keys.flag("pooling_mode_mean_tokens", False),
        "max": keys.flag("pooling_mode_max_tokens", False),
        "mean_sqrt_len": keys.flag("pooling_mode_mean_sqrt_len_tokens", False),
        "weightedmean": keys.flag("pooling_mode_weightedmean_tokens", False),
        "lasttoken": keys.flag("pooling_mode_lasttoken", False),
    }
    chosen = [mode for mode, on in modes.items() if on] or [keys.text("pooling_mode", "mean")]
    if chosen == ["mean"]:
        return "mean"
    if chosen == ["cls"]:
        return "cls"
    raise ModelFormatError(
        f"{path}/config.json: pools by {' and '.join(chosen)}; only cls, or mean, is supported."
    )
