"""The program that our engine would run for a network, recorded without its weights.

The engine's own recorder makes it, so that fusions, formats and barriers are those of the real thing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.cpu import _native
from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.packing import F32, WeightFormat, pack
from headrace.backend.cpu.recorder import record
from headrace.backend.cpu.weights_file import PackedTensor, tensor_names
from headrace.backend.runner import RunnerSettings
from headrace.errors import ConfigError
from headrace.lab.plan.source import Source
from headrace.model.checkpoint import Checkpoint, Dense, Tensor
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint
from headrace.model.weights.gguf_names import gguf_name
from headrace.model.weights.gguf_types import read_quantized
from headrace.model.weights.load_quantization import Quantization, narrow
from headrace.model.weights.safetensors import SafetensorsCheckpoint
from headrace.model.weights.tensor_shapes import expected_shapes

STEP_TOKENS = 512  # the scheduler's default budget: longer prompts are computed in chunks of so many
_ROWS = 16  # outputs of one packed tile


def record_step(source: Source, quantization: Quantization | None = None) -> NDArray[np.void]:
    """Instructions of one step, in order (fields: ``backend/cpu/instruction.py``).

    ``quantization`` narrows float weights as loading would; without files, they are bf16. Raises ConfigError
    for a network that our engine does not run, ModelFormatError for files that it does not read.
    """
    if source.network.experts is not None:
        raise ConfigError("headrace's engine runs no mixture of experts yet; plan it for other hardware.")
    architecture = source.network.architecture
    formats = _formats(source, quantization)
    nodes = network_graph(architecture)
    shapes = expected_shapes(architecture)
    tensors: dict[str, PackedTensor] = {}
    end = 0
    for name in tensor_names(nodes):
        n, k = shapes[name][0], shapes[name][1] if len(shapes[name]) == 2 else 0
        tensors[name] = PackedTensor(end, n, k, formats.get(name, WeightFormat(F32)))
        end += -(-tensors[name].size_bytes // 64) * 64
    settings = RunnerSettings(
        num_blocks=architecture.max_positions // BLOCK_SIZE + 1,
        max_batch_tokens=STEP_TOKENS,
        max_sequences=1,
        max_model_len=architecture.max_positions,
    )
    return record(nodes, architecture, tensors, settings, _native.quant_row_bytes).instructions


def matrix_bytes(program: NDArray[np.void]) -> int:
    """Packed matrices that the program multiplies by."""
    from headrace.backend.cpu.instruction import Op

    return sum(
        WeightFormat(*row["format"].tolist()).matrix_bytes(int(row["i0"]), int(row["i1"]))
        for row in program
        if row["op"] == Op.MATMUL
    )


def _formats(source: Source, quantization: Quantization | None) -> dict[str, WeightFormat]:
    """How each matrix would be packed: found out on sixteen rows of it."""
    shapes = expected_shapes(source.network.architecture)
    matrices = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2}
    checkpoint = None if source.path is None else open_checkpoint(source.path)
    found: dict[tuple[object, ...], WeightFormat] = {}
    formats = {}
    for name, k in matrices.items():
        key = (_stored_as(checkpoint, name), k, name.startswith("layers."))
        if key not in found:
            found[key] = pack(narrow(name, _sample(checkpoint, name, k), quantization), name)[0]
        formats[name] = found[key]
    return formats


def _stored_as(checkpoint: Checkpoint | None, name: str) -> object:
    """Equal for matrices that their files hold alike."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.file.tensors[gguf_name(name)].type
    return checkpoint.stored_as(name) if isinstance(checkpoint, SafetensorsCheckpoint) else None


def _sample(checkpoint: Checkpoint | None, name: str, k: int) -> Tensor:
    """Sixteen rows as they would be read; floats of a value that bfloat16 rounds."""
    import ml_dtypes

    dtype: np.dtype[np.void] | type = ml_dtypes.bfloat16
    if isinstance(checkpoint, GGUFCheckpoint):
        kind = checkpoint.file.tensors[gguf_name(name)].type
        if kind.unpack is not None:
            size = _ROWS * k // kind.block_size * kind.block_bytes
            return read_quantized(np.zeros(size, np.uint8), kind, _ROWS, k)
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind.name, ml_dtypes.bfloat16)
    elif checkpoint is not None:
        tensor = checkpoint.tensor(name)  # floats are a view of the file: nothing is read
        if isinstance(tensor, QuantTensor):
            return tensor.take_rows(np.arange(min(_ROWS, tensor.shape[0])))
        dtype = tensor.dtype
    dense: Dense = np.full((_ROWS, k), 1 / 3, dtype)
    return dense
