"""Readers of weight files: GGUF and safetensors; load-time quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from headrace.model.weights.load_quantization import Quantization

__all__ = ["open_checkpoint"]


def open_checkpoint(path: Path, *, quantization: Quantization | None = None) -> Checkpoint:
    """Open a GGUF file or a folder that holds one; a folder of config.json and safetensors, or one such file.

    ``quantization`` narrows float weights while they are loaded; those quantised already keep their format.
    Raises ModelNotFoundError if there is nothing at ``path``; ModelFormatError if it is no model that
    headrace reads, a pickled one included.
    """
    from headrace.model.weights.pickles import PICKLE_SUFFIXES, pickle_refusal

    try:
        if not path.exists():
            raise ModelNotFoundError(f"There is no model at {path}.")
        if not path.is_dir():
            if path.suffix == ".safetensors":
                return _open_safetensors(path.parent, quantization)
            return _open_gguf(path, quantization)
        files = sorted(entry for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise ModelFormatError(f"The model at {path} cannot be read: {error.strerror or error}.") from None
    safetensors = [entry for entry in files if entry.suffix == ".safetensors"]
    if safetensors and (path / "config.json").is_file():
        return _open_safetensors(path, quantization)
    ggufs = [entry for entry in files if entry.suffix == ".gguf"]
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0], quantization)
    if ggufs:
        names = ", ".join(entry.name for entry in ggufs)
        raise ModelFormatError(f"The folder {path} holds several GGUF files: name one of {names}.")
    if safetensors:
        raise ModelFormatError(f"The folder {path} holds safetensors, but no config.json to describe them.")
    pickles = [entry for entry in files if entry.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise pickle_refusal(pickles[0])
    raise ModelFormatError(
        f"The folder {path} holds no model: it should contain a .gguf file, or config.json and *.safetensors."
    )


def _open_gguf(path: Path, quantization: Quantization | None) -> Checkpoint:
    from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path, quantization=quantization)


def _open_safetensors(path: Path, quantization: Quantization | None) -> Checkpoint:
    from headrace.model.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path, quantization=quantization)
