"""What every weights reader answers: an architecture, tensors by canonical name, and a tokenizer's source."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.model.architecture import Architecture
from headrace.model.quant_tensor import QuantTensor

Dense = NDArray[Any]  # float32, float16 or ml_dtypes.bfloat16
Tensor = Dense | QuantTensor


class Checkpoint(Protocol):
    """An open model: a GGUF file or a folder of safetensors. Reads lazily; holds no tensor in memory."""

    architecture: Architecture
    path: Path

    def names(self) -> tuple[str, ...]:
        """Canonical names (see ``architecture.py``) of all tensors, in file order."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name. Raises ModelFormatError if its bytes are not what they claim."""
        ...

    def fingerprint(self) -> str:
        """Identifies the source cheaply: size, mtime, inode of every file, and load-time settings."""
        ...


def as_float32(tensor: Tensor) -> NDArray[np.float32]:
    """Any tensor as a float32 array of the same shape."""
    if isinstance(tensor, QuantTensor):
        return tensor.dequantize()
    return np.asarray(tensor, dtype=np.float32)
