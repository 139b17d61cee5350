"""The model as a Transformers folder in bfloat16: what the baseline and the first steps load."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from benchmarks.peers.float_checkpoint import write_dequantised
from headrace.model.weights import open_checkpoint
from headrace.paths import cache_dir


def float_folder(path: Path) -> Path:
    """A folder that transformers loads, with the weights of the model at ``path``.

    A folder of safetensors is taken as it is. A GGUF file of the Llama family is dequantised and rounded to
    bfloat16, once: the folder is kept in the cache. Raises ConfigError for other families.
    """
    if path.is_dir() and (path / "config.json").is_file():
        return path
    checkpoint = open_checkpoint(path)
    key = hashlib.blake2b(checkpoint.fingerprint().encode(), digest_size=8).hexdigest()
    folder = cache_dir() / "journey" / f"{path.stem}-{key}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        write_dequantised(path, unfinished, "bfloat16")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
