"""GGUF files for tests: small models through the reference writer, and broken files byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

STORED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_HALVES = {  # where the float16 fields of a block lie
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}


def random_blocks(rng: np.random.Generator, type_name: str, rows: int, columns: int) -> np.ndarray:
    """Packed bytes ``[rows, bytes per row]`` of random codes with finite scales of either sign."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    packed = rng.integers(0, 256, size=(rows * columns // block, size), dtype=np.uint8)
    for at in _HALVES[type_name]:
        halves = rng.normal(scale=0.02, size=(packed.shape[0], 1)).astype("<f2")
        packed[:, at : at + 2] = halves.view(np.uint8)
    return packed.reshape(rows, -1)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]],
    *,
    alignment: int | None = None,
) -> Path:
    """Write through the reference writer. A tensor is a float array, or a type's name and packed bytes."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=GGMLQuantizationType[tensor[0]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Keys of a two-layer model that fits ``tiny_tensors``; a change to None removes the key.

    In ``changes``, keys are given without the architecture and with ``__`` for dots.
    """
    keys: dict[str, Any] = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        keys["attention.sliding_window"] = 32
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    named = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, **named}


def tiny_tensors(architecture: str = "llama", *, seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """Random float32 tensors under GGUF names: hidden 64, 4/2 heads of 16, ffn 96, vocabulary 50, tied."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(scale=0.1, size=shape).astype(np.float32)

    tensors = {"token_embd.weight": weight(50, 64), "output_norm.weight": weight(64)}
    for index in range(layers):
        block = {"attn_norm.weight": weight(64), "ffn_norm.weight": weight(64)}
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            block[f"attn_{part}.weight"] = weight(rows, 64)
            if architecture == "qwen2":
                block[f"attn_{part}.bias"] = weight(rows)
        block["attn_output.weight"] = weight(64, 64)
        if architecture in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": weight(16), "attn_k_norm.weight": weight(16)}
        if architecture == "gemma3":
            block |= {"post_attention_norm.weight": weight(64), "post_ffw_norm.weight": weight(64)}
        block |= {"ffn_gate.weight": weight(96, 64), "ffn_up.weight": weight(96, 64)}
        block["ffn_down.weight"] = weight(64, 96)
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in block.items()}
    return tensors


# Byte by byte: what no honest writer would write.


def text(value: bytes, length: int | None = None) -> bytes:
    """A string, whose length may lie."""
    return struct.pack("<Q", len(value) if length is None else length) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """One metadata key with its type and the bytes of its value."""
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes) -> bytes:
    """The value of an array key."""
    return struct.pack("<IQ", kind, count) + elements


def description(
    name: bytes, shape: Sequence[int], kind: int, offset: int, *, rank: int | None = None
) -> bytes:
    """One tensor's description; ``shape`` in the file's order, fastest dimension first."""
    dims = struct.pack("<I", len(shape) if rank is None else rank) + struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def raw_gguf(
    pairs: Sequence[bytes] = (),
    descriptions: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> bytes:
    """A file of these parts, padded to 32 before the data."""
    counts = (
        len(descriptions) if tensor_count is None else tensor_count,
        len(pairs) if key_count is None else key_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(descriptions)
    return head + b"\0" * (-len(head) % 32) + data
