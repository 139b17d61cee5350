"""What lies beside the weights of a Transformers folder: tokenizer, chat template, generation settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelFormatError
from headrace.frontend.tokenizer_cache import convert_file
from headrace.model.weights.json_file import read_json

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_MAX_BYTES = 200_000_000
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def side_files(source: Path) -> dict[str, bytes]:
    """Names and contents: those of a folder, or made from what a GGUF file says.

    Raises ModelFormatError for a source without a tokenizer, or with files that cannot be read.
    """
    if source.is_file() and source.suffix != ".safetensors":
        return _of_gguf(source)
    folder = source if source.is_dir() else source.parent
    files = {}
    for name in _COPIED:
        path = folder / name
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > _MAX_BYTES:
                raise ModelFormatError(f"{path} is over {_MAX_BYTES} bytes: that is no part of a tokenizer.")
            files[name] = path.read_bytes()
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    if "tokenizer.json" not in files:
        raise ModelFormatError(f"{folder} has no tokenizer.json, which a model cannot be served without.")
    return files


def token_ids(source: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """The ids of special tokens for ``config.json``: as the source's own says, or its generation settings."""
    found: dict[str, Any] = {}
    described = json.loads(files.get("generation_config.json", b"{}"))
    if source.is_dir() and (source / "config.json").is_file():
        described = {**described, **read_json(source / "config.json")}
    for key in _TOKENS:
        value = described.get(key)
        if isinstance(value, int | list) and not isinstance(value, bool):
            found[key] = value
    return found


def _of_gguf(path: Path) -> dict[str, bytes]:
    files = convert_file(path)
    config = {
        key: value for key, value in json.loads(files["tokenizer_config.json"]).items() if value is not None
    }
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    generation = json.loads(files["generation_config.json"])
    kept = {key: value for key, value in generation.items() if value not in (None, [])}
    return {
        "tokenizer.json": files["tokenizer.json"],
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(kept, indent=1).encode(),
    }
