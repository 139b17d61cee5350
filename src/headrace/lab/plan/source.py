"""What the user named, as a network: a local model, a catalogue name, a known shape, or sizes alone."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, ModelFormatError, ModelNotFoundError
from headrace.lab.plan.network import Experts, Network, Precision
from headrace.model import store
from headrace.model.checkpoint import Checkpoint
from headrace.model.store.catalogue import catalogue
from headrace.model.weights import open_checkpoint
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint
from headrace.model.weights.gguf_names import gguf_name
from headrace.model.weights.hf_config import architecture_from_hf
from headrace.model.weights.hf_keys import Keys
from headrace.model.weights.json_file import read_json
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.tensor_shapes import expected_shapes


@dataclass(frozen=True, slots=True)
class Source:
    """A network, and where its weights are if they are here.

    ``stored``: how files of quantised weights hold them; None where weights are 16 bits wide, or there are
    none.
    """

    network: Network
    path: Path | None = None
    stored: Precision | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """A llama-like network by its numbers, as model cards give them. ``head_dim``: default hidden / heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int | None = None
    window: int | None = None
    experts: int | None = None
    active_experts: int | None = None
    tied_head: bool = False

    def network(self) -> Network:
        """Raises ConfigError for numbers that no network has."""
        config: dict[str, Any] = {
            "model_type": "mistral",  # the family whose config knows a window
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "head_dim": self.head_dim,
            "sliding_window": self.window,
            "tie_word_embeddings": self.tied_head,
            "max_position_embeddings": 2**24,  # sizes say nothing about it
        }
        try:
            architecture = architecture_from_hf(config)
        except ModelFormatError as error:
            message = error.message.removeprefix("config.json: ")
            for key, option in _SIZE_OPTIONS.items():
                message = message.replace(f"'{key}'", option)
            raise ConfigError(message) from None
        if (self.experts is None) != (self.active_experts is None):
            raise ConfigError("--experts and --active-experts go together.")
        experts = None
        if self.experts is not None and self.active_experts is not None:
            experts = _experts(self.experts, self.active_experts)
        return Network("the given sizes", architecture, experts)


_SIZE_OPTIONS = {
    "num_hidden_layers": "--layers",
    "hidden_size": "--hidden",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "intermediate_size": "--ffn",
    "vocab_size": "--vocab",
    "head_dim": "--head-dim",
    "sliding_window": "--window",
}


@functools.cache
def known_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Well-known networks by name: keys of their ``config.json``, and ``source``, where those are from."""
    with Path(__file__).with_name("shapes.toml").open("rb") as file:
        return tomllib.load(file)


def find(model: str, progress: store.Progress | None = None) -> Source:
    """What ``model`` names: a known shape, ``config.json`` or a folder with one, or what the store resolves.

    Of a hub's repository only the configuration is fetched; what the catalogue names is pulled. Raises
    ModelNotFoundError, ModelFormatError, DownloadError.
    """
    if model in known_shapes() and model not in catalogue():
        return Source(network_from_hf(model, known_shapes()[model]))
    path = Path(model).expanduser()
    try:
        local = path.exists()
    except OSError:  # a name too long for the file system
        local = False
    if local and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        path = path / "config.json"
    if local and path.suffix == ".json":
        return Source(network_from_hf(model, read_json(path)))
    if local and (path / "config.json").is_file():
        return _from_folder(model, path)
    try:
        config = store.configuration(model)
        path = store.resolve(model, progress=progress) if config is None else config
    except ModelNotFoundError as error:
        raise _not_found(model, error) from None
    if config is not None:
        return Source(network_from_hf(model, read_json(config)))
    if path.is_dir():
        return _from_folder(model, path)
    return _from_file(model, path)


def network_from_hf(name: str, config: Mapping[str, Any]) -> Network:
    """A parsed ``config.json``. Knows experts of Mixtral and Qwen 3 besides what the engine runs."""
    config = dict(config)
    kind = config.get("model_type")
    experts = None
    if kind in _EXPERT_FAMILIES:
        family, count_key, width_key = _EXPERT_FAMILIES[kind]
        keys = Keys(config)
        dense_too = keys.has("mlp_only_layers") and config["mlp_only_layers"] != []
        if dense_too or keys.integer("decoder_sparse_step", 1) != 1:
            raise keys.wrong("mlp_only_layers", "leaves some layers without experts, which is not supported")
        experts = _experts(keys.integer(count_key), keys.integer("num_experts_per_tok"))
        width = keys.integer(width_key)
        for key in ("num_experts", "num_local_experts", "moe_intermediate_size"):
            config.pop(key, None)
        config |= {"model_type": family, "intermediate_size": width}
    architecture = architecture_from_hf(config)
    _refuse_encoders(architecture.encoder is not None, name)
    return Network(name, architecture, experts)


_EXPERT_FAMILIES = {  # model_type: the dense family it is made of, keys of its experts' number and width
    "mixtral": ("llama", "num_local_experts", "intermediate_size"),
    "qwen3_moe": ("qwen3", "num_experts", "moe_intermediate_size"),
}


def _experts(count: int, active: int) -> Experts:
    if not 1 <= active <= count:
        raise ConfigError(f"A token can use from 1 to {count} experts, not {active}.")
    return Experts(count, active)


def _from_folder(name: str, path: Path) -> Source:
    config = read_json(path / "config.json")
    if config.get("quantization_config") is None:
        return Source(network_from_hf(name, config), path)
    return _from_file(name, path)


def _from_file(name: str, path: Path) -> Source:
    checkpoint = open_checkpoint(path)
    _refuse_encoders(checkpoint.architecture.encoder is not None, name)
    network = Network(name, checkpoint.architecture)
    quantised = isinstance(checkpoint, SafetensorsCheckpoint) and checkpoint.quantised
    if not (quantised or isinstance(checkpoint, GGUFCheckpoint)):
        return Source(network, path)
    matrices = head = 0
    shapes = expected_shapes(checkpoint.architecture)
    for canonical in checkpoint.names():
        if canonical in ("embed.weight", "head.weight"):
            head += _stored_bytes(checkpoint, canonical)
        elif len(shapes[canonical]) == 2:
            matrices += _stored_bytes(checkpoint, canonical)
    heads = 1 if checkpoint.architecture.tied_head else 2
    stored = Precision(
        "as stored",
        matrices / network.matrix_parameters(),
        "bf16",
        head_bytes=head / (heads * network.embedding_parameters()),
    )
    return Source(network, path, stored)


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.file.tensors[gguf_name(name)].size
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    return checkpoint.stored_bytes(name)


def _refuse_encoders(encoder: bool, name: str) -> None:
    if encoder:
        raise ConfigError(f"{name} is an encoder: it generates nothing, and plan counts generated tokens.")


def _not_found(model: str, error: ModelNotFoundError) -> ModelNotFoundError:
    close = difflib.get_close_matches(model, [*known_shapes(), *catalogue()], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    shapes = ", ".join(known_shapes())
    return ModelNotFoundError(
        f"{error.message.partition(' Did you mean')[0].partition(' Known names')[0]}{hint} "
        f"Known shapes: {shapes}; a model that is here: {', '.join(catalogue())}, a folder, a GGUF file; "
        "or give sizes: --layers --hidden --heads --kv-heads --ffn --vocab.",
        param="model",
    )
