"""A Hugging Face folder of safetensors as a :class:`~headrace.model.checkpoint.Checkpoint`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.errors import ModelFormatError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Dense, Tensor, as_float32
from headrace.model.weights import bert
from headrace.model.weights.hf_config import architecture_from_hf
from headrace.model.weights.json_file import read_json
from headrace.model.weights.load_quantization import Quantization, narrow
from headrace.model.weights.pickles import PICKLE_SUFFIXES, pickle_refusal
from headrace.model.weights.quantization_config import method_of
from headrace.model.weights.quantized_linear import Method, Module
from headrace.model.weights.safetensors_file import READABLE, Entry, SafetensorsFile
from headrace.model.weights.tensor_shapes import expected_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_COMPUTED = ".rotary_emb.inv_freq"  # a buffer that old exporters saved along; the network computes it

_LAYER_PARTS = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
_POST_NORM_PARTS = {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}


class SafetensorsCheckpoint:
    """An open folder with ``config.json`` and ``model.safetensors`` or shards with their index.

    ``quantization`` narrows float linear weights while they are read, and the embedding and head to int8.
    Linears that are quantised already (``quantization_config``) come as they are stored. Everything but the
    weights' values is checked on opening. Raises ModelFormatError.
    """

    def __init__(self, path: Path, *, quantization: Quantization | None = None) -> None:
        self.path = path
        self._quantization = quantization
        config = read_json(path / "config.json")
        self._method = method_of(config)
        self.architecture: Architecture = bert.with_sentence_modules(architecture_from_hf(config), path)
        files = _weight_files(path)
        self._sources = [path / "config.json", *files]
        tensors = _collect(files)
        self._tensors = _match(self.architecture, tensors, self._method)
        self._token_types = None
        if self.architecture.encoder is not None:
            self._token_types = _token_types(self.architecture, tensors)

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, in file order."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name: a read-only view of the file, or a copy where it is transformed.

        Raises KeyError for a name that is not in :meth:`names`.
        """
        stored = self._tensors[name]
        if isinstance(stored, Module):
            assert self._method is not None
            return self._method.read(stored)
        file, hf_name = stored
        dense: Dense = file.read(hf_name)
        if self.architecture.family == "gemma3" and "norm" in name:
            # HF Gemma stores weight - 1; in float32, as its own implementation adds it
            return np.asarray(dense, dtype=np.float32) + np.float32(1)
        if name == "position_embed.weight" and self._token_types is not None:
            # A text by itself is all of token type 0: its row is part of every position's.
            types, types_name = self._token_types
            return as_float32(dense) + as_float32(types.read(types_name)[:1])
        return narrow(name, dense, self._quantization)

    def stored_as(self, name: str) -> tuple[object, ...]:
        """Equal for tensors that their files hold alike: dtypes and shapes of what makes them.

        Raises KeyError for a name that is not in :meth:`names`.
        """
        stored = self._tensors[name]
        if isinstance(stored, Module):
            parts = sorted(stored.parts.items())
            return tuple((part, entry.dtype, entry.shape) for part, (_, entry) in parts)
        file, hf_name = stored
        return (file.entries[hf_name].dtype, file.entries[hf_name].shape)

    def places(self, name: str) -> dict[str, tuple[SafetensorsFile, Entry]]:
        """Where all that makes one tensor lies, by the last part of its name in the files.

        Raises KeyError for a name that is not in :meth:`names`.
        """
        stored = self._tensors[name]
        if isinstance(stored, Module):
            return dict(stored.parts)
        file, hf_name = stored
        return {hf_name.rpartition(".")[2]: (file, file.entries[hf_name])}

    def stored_bytes(self, name: str) -> int:
        """Bytes of all that makes one tensor. Raises KeyError for a name that is not in :meth:`names`."""
        return sum(entry.end - entry.start for _, entry in self.places(name).values())

    @property
    def quantised(self) -> bool:
        """Whether some linears are quantised in the files."""
        return any(isinstance(stored, Module) for stored in self._tensors.values())

    def fingerprint(self) -> str:
        """Identifies the source cheaply: size, mtime, inode of every file, and the load-time quantisation."""
        digest = hashlib.sha256(repr(self._quantization).encode())
        if self.architecture.encoder is not None:  # read from further files: equal ones give equal vectors
            digest.update(repr(self.architecture.encoder).encode())
        for source in self._sources:
            stat = source.stat()
            digest.update(f"|{source.name}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}".encode())
        return digest.hexdigest()


Tensors = dict[str, tuple[SafetensorsFile, Entry]]
Stored = Module | tuple[SafetensorsFile, str]
"""Where a canonical tensor is: in several tensors of a quantised linear, or in the one of this name."""


def _match(architecture: Architecture, tensors: Tensors, method: Method | None) -> dict[str, Stored]:
    """Find every tensor that the architecture needs, in file order; refuse a surplus one in a layer.

    A tensor too many inside the network (a bias that config.json denies, a layer beyond the last) means that
    config.json describes another network: running it would yield fluent nonsense.
    """
    naming = _naming(architecture)
    prefix = next((p for p in naming.prefixes if p + naming.embedding in tensors), None)
    if prefix is None:
        raise ModelFormatError(f"The checkpoint has no tensor '{naming.prefixes[0]}{naming.embedding}'.")
    modules = _modules(tensors) if method is not None else {}
    canonical: dict[str, str] = {}
    quantised: dict[str, Module] = {}  # by the tensor with the codes
    used: set[str] = set()
    for name, shape in expected_shapes(architecture).items():
        if name == "head.weight":
            hf_names = [head for head in _HEADS if head in tensors or head.removesuffix(".weight") in modules]
            hf_name = hf_names[0] if hf_names else _HEADS[0]
        else:
            hf_name = prefix + naming.hf_name(name)
        module_name = hf_name.removesuffix(".weight")
        if method is not None and len(shape) == 2 and "embed" not in name and module_name in modules:
            module = Module(module_name, (shape[0], shape[1]), modules[module_name])
            parts = [f"{module_name}.{part}" for part in method.check(module)]
            if parts:
                canonical[parts[0]], quantised[parts[0]] = name, module
                used.update(parts)
                continue
        if hf_name not in tensors:
            hint = " ('tie_word_embeddings' is false)" if name == "head.weight" else ""
            raise ModelFormatError(f"The checkpoint has no tensor {hf_name!r}{hint}.")
        entry = tensors[hf_name][1]
        if entry.shape != shape:
            raise ModelFormatError(
                f"Tensor {hf_name!r} is {list(entry.shape)}, but config.json makes it {list(shape)}."
            )
        if entry.dtype not in READABLE:
            raise ModelFormatError(
                f"Tensor {hf_name!r} is {entry.dtype}; weights must be one of {', '.join(READABLE)}."
            )
        canonical[hf_name] = name
    for hf_name in tensors:
        inside = hf_name.startswith(prefix + naming.layers)
        if not inside or hf_name in canonical or hf_name in used or hf_name.endswith(_COMPUTED):
            continue
        if method is not None and _is_needless(hf_name, tensors, method, used):
            continue
        raise ModelFormatError(f"Tensor {hf_name!r} has no place in the network of config.json.")
    return {
        canonical[name]: quantised.get(name, (file, name))
        for name, (file, _) in tensors.items()
        if name in canonical
    }


def _modules(tensors: Tensors) -> dict[str, Mapping[str, tuple[SafetensorsFile, Entry]]]:
    """Tensors by the module that they belong to, and then by the last part of their names."""
    found: dict[str, dict[str, tuple[SafetensorsFile, Entry]]] = {}
    for name, where in tensors.items():
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = where
    return dict(found)


def _is_needless(name: str, tensors: Tensors, method: Method, used: set[str]) -> bool:
    """Whether a tensor changes nothing: scales of activations, or a bias of zeros that a quantiser added."""
    module, _, part = name.rpartition(".")
    if part in method.ignored:
        return True
    file, entry = tensors[name]
    quantised = any(f"{module}.{codes}" in used for codes in ("qweight", "weight_packed", "weight"))
    return part == "bias" and quantised and entry.dtype in READABLE and not file.read(name).any()


class _Naming(NamedTuple):
    """How a family's checkpoints name tensors, after a prefix by which the embedding is found."""

    prefixes: tuple[str, ...]
    embedding: str
    layers: str  # how the names of layers' tensors begin
    hf_name: Callable[[str], str]  # of a canonical name


def _naming(architecture: Architecture) -> _Naming:
    if architecture.encoder is not None:
        return _Naming(bert.PREFIXES, bert.EMBEDDING, bert.LAYERS, bert.hf_name)
    post_norms = any(layer.post_norms for layer in architecture.layers)
    return _Naming(_PREFIXES, "embed_tokens.weight", "layers.", lambda name: hf_name(name, post_norms))


def _token_types(architecture: Architecture, tensors: Tensors) -> tuple[SafetensorsFile, str]:
    """Where the table of token types is: it is no part of the network, but of its position table."""
    found = next((p + bert.TOKEN_TYPES for p in bert.PREFIXES if p + bert.TOKEN_TYPES in tensors), None)
    if found is None:
        raise ModelFormatError(f"The checkpoint has no tensor {bert.TOKEN_TYPES!r}.")
    file, entry = tensors[found]
    if len(entry.shape) != 2 or entry.shape[0] < 1 or entry.shape[1] != architecture.hidden_size:
        raise ModelFormatError(
            f"Tensor {found!r} is {list(entry.shape)}, but config.json makes it rows of "
            f"{architecture.hidden_size}."
        )
    if entry.dtype not in READABLE:
        raise ModelFormatError(
            f"Tensor {found!r} is {entry.dtype}; weights must be one of {', '.join(READABLE)}."
        )
    return file, found


def hf_name(name: str, post_norms: bool) -> str:
    """The Hugging Face name, without the model's prefix, of a canonical one."""
    if not name.startswith("layers."):
        return name.replace("embed.", "embed_tokens.").replace("final_norm.", "norm.")
    _, index, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    hf_part = (_POST_NORM_PARTS.get(part) if post_norms else None) or _LAYER_PARTS[part]
    return f"layers.{index}.{hf_part}.{kind}"


def _collect(files: list[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in files:
        try:
            file = SafetensorsFile(path)
        except OSError as error:
            raise ModelFormatError(f"{path.name} cannot be read: {error.strerror}.") from error
        for name, entry in file.entries.items():
            if name in tensors:
                raise ModelFormatError(f"Tensor {name!r} is in {tensors[name][0].path.name} and {path.name}.")
            tensors[name] = (file, entry)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, the one of the usual name, or the only one."""
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelFormatError(
            f"{folder.name} has {len(found)} safetensors files, but neither {_SINGLE} nor {_INDEX} to say "
            "which belong to the model."
        )
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise pickle_refusal(pickles[0])
    raise ModelFormatError(f"{folder.name} has no weights: neither {_SINGLE} nor {_INDEX}.")


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{_INDEX}: 'weight_map' must be an object of tensor names and file names.")
    files: dict[str, Path] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelFormatError(
                f"{_INDEX}: the file of {tensor!r} must be a plain *.safetensors name in the same folder."
            )
        files[name] = folder / name
    for name, path in files.items():
        if not path.is_file():
            raise ModelFormatError(f"{_INDEX} names {name}, which is missing: pull the model again.")
    return [files[name] for name in sorted(files)]
