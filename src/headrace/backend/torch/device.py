"""Devices, dtypes and memory of the torch backend."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import psutil
import torch

from headrace.errors import ConfigError
from headrace.model.checkpoint import Tensor, as_float32

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_device(name: str) -> torch.device:
    """The named device, proven to work by a round trip through its memory. Raises ConfigError."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"Device {name!r} cannot be used: {reason} Use 'cpu', or install the torch build for the device.",
            param="device",
        ) from error
    return device


def device_name(device: torch.device) -> str:
    """What the hardware calls itself; everything but the CPU is marked experimental."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} (experimental)"


def compute_dtype(device: torch.device, asked: object) -> torch.dtype:
    """The dtype of weights, activations and KV, ``asked`` by name.

    None means float32 on the CPU and bfloat16 elsewhere. Raises ConfigError.
    """
    if asked is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if not isinstance(asked, str) or asked not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {asked!r}.", param="dtype")
    return _DTYPES[asked]


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on the device; None where torch cannot tell."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def to_torch(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A checkpoint's tensor, dequantised if need be, copied to ``device`` as ``dtype``."""
    if isinstance(tensor, np.ndarray) and tensor.dtype == ml_dtypes.bfloat16:
        # torch does not know numpy's bfloat16: hand the bits over
        bits = torch.tensor(tensor.view(np.int16))
        return bits.view(torch.bfloat16).to(device=device, dtype=dtype)
    return torch.tensor(as_float32(tensor)).to(device=device, dtype=dtype)
