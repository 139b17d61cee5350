"""Recognising pickled checkpoints, which are refused: opening a pickle runs the code inside it."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ModelFormatError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def refuse_pickle(path: Path, start: bytes) -> None:
    """Raise ModelFormatError if a file that starts with these bytes is a pickle or a torch archive."""
    if start.startswith(b"PK\x03\x04") or (
        start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    ):
        raise pickle_refusal(path)


def pickle_refusal(path: Path) -> ModelFormatError:
    """The error that refuses ``path`` and says the way out."""
    return ModelFormatError(
        f"{path} is a pickled checkpoint. Opening one runs whatever code it holds, so headrace never does. "
        "Use the model's safetensors or GGUF files, or convert it where you trust it: load it with torch, "
        "then write it with safetensors.torch.save_file."
    )
