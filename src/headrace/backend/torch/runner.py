"""TorchRunner: a checkpoint on a torch device, run eagerly."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

import headrace
from headrace.backend.batch import BLOCK_SIZE, Batch, Float32, StepResult, pooled
from headrace.backend.kv_format import KVCacheDtype, check_kv_cache_dtype, kv_block_bytes
from headrace.backend.runner import Capabilities, RunnerSettings
from headrace.backend.sampling import sample
from headrace.backend.torch.device import compute_dtype, device_name, free_bytes, open_device, to_torch
from headrace.backend.torch.kv import TorchKV
from headrace.backend.torch.ops import TorchOps
from headrace.backend.torch.step import TorchStep
from headrace.errors import EngineDeadError, InvalidRequestError, ModelFormatError, OutOfMemoryError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint
from headrace.model.network import run
from headrace.model.weights.tensor_shapes import expected_shapes


class TorchRunner:
    """A loaded model; implements :class:`~headrace.backend.runner.Runner`.

    On the CPU it computes in float32 from dequantised weights: the reference that other backends are measured
    against. On any other device it computes in bfloat16; that is experimental. ``settings.extra["dtype"]``
    (float32, bfloat16, float16) overrides either. ``settings.kv_cache_dtype`` "auto" keeps K and V in the
    dtype of the computation. Not batch invariant: torch picks its kernels by shape.

    Raises ConfigError for a device or dtype that cannot be used, ModelFormatError for bad weights,
    OutOfMemoryError before loading when weights and KV would not fit.
    """

    def __init__(self, checkpoint: Checkpoint, settings: RunnerSettings) -> None:
        self.architecture = checkpoint.architecture
        check_kv_cache_dtype(settings.kv_cache_dtype)
        self._device = open_device(settings.device)
        self._dtype = compute_dtype(self._device, settings.extra.get("dtype"))
        if settings.threads > 0:
            torch.set_num_threads(settings.threads)
        self._kv_cache_dtype = settings.kv_cache_dtype
        num_blocks = max(settings.group_blocks, default=settings.num_blocks)
        _refuse_what_does_not_fit(
            self.architecture, num_blocks, self._device, self._dtype, self._kv_cache_dtype
        )
        self._weights: dict[str, torch.Tensor] | None = _load(checkpoint, self._device, self._dtype)
        self._kv: TorchKV | None = self._new_kv(num_blocks)
        groups = range(len(self.architecture.kv_groups))
        self.block_bytes = tuple(self._kv.block_bytes(group) for group in groups)
        dtype_name = str(self._dtype).removeprefix("torch.")
        kv_dtype = dtype_name if self._kv_cache_dtype == "auto" else self._kv_cache_dtype
        isa = device_name(self._device)
        source = checkpoint.fingerprint()
        identity = (headrace.__version__, torch.__version__, isa, dtype_name, kv_dtype, source)
        self.capabilities = Capabilities(
            backend="torch",
            isa=isa,
            batch_invariant=False,
            kv_dtype=kv_dtype,
            threads=torch.get_num_threads(),
            fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest(),
        )

    def run(self, batch: Batch) -> StepResult:
        """Execute one step and sample its logit rows, or pool its sequences."""
        output = self.logits(batch)
        if self.architecture.encoder is not None:
            return pooled(output)
        return sample(output, batch.sampling)

    def logits(self, batch: Batch) -> Float32:
        """Execute one step without sampling: the raw logits ``[m, vocab]`` of its logit rows.

        Of an encoder: its sequences' vectors ``[r, hidden]``.
        """
        return self._forward(TorchStep.from_batch(batch, self._device), self._open_kv())

    def sequence_logits(self, token_ids: Sequence[int]) -> Float32:
        """Logits ``[len, vocab]`` after every prefix of a sequence, apart from the runner's own KV cache.

        Raises InvalidRequestError for an empty sequence or ids outside the vocabulary.
        """
        vocab = self.architecture.vocab_size
        if not token_ids or not all(0 <= token < vocab for token in token_ids):
            raise InvalidRequestError(f"token_ids must be one or more ids from 0 to {vocab - 1}.")
        step = TorchStep.whole_sequence(token_ids, len(self.architecture.kv_groups), self._device)
        return self._forward(step, self._new_kv(math.ceil(len(token_ids) / BLOCK_SIZE)))

    def read_blocks(self, group: int, blocks: list[int]) -> NDArray[np.uint8]:
        """See :meth:`Runner.read_blocks`."""
        copied: NDArray[np.uint8] = self._open_kv().read_blocks(group, blocks).numpy()
        return copied

    def write_blocks(self, group: int, blocks: list[int], data: NDArray[np.uint8]) -> None:
        """See :meth:`Runner.write_blocks`."""
        self._open_kv().write_blocks(group, blocks, torch.from_numpy(data))

    def close(self) -> None:
        """Release weights and KV."""
        self._weights = None
        self._kv = None

    def _forward(self, step: TorchStep, kv: TorchKV) -> Float32:
        if self._weights is None:
            raise EngineDeadError("The runner is closed.")
        with torch.inference_mode():
            ops = TorchOps(self._weights, kv, step)
            run(ops, self.architecture)
            assert ops.output is not None  # every definition ends in sample or pool
            rows: Float32 = ops.output.float().cpu().numpy()
        return np.ascontiguousarray(rows)

    def _open_kv(self) -> TorchKV:
        if self._kv is None:
            raise EngineDeadError("The runner is closed.")
        return self._kv

    def _new_kv(self, num_blocks: int) -> TorchKV:
        return TorchKV(
            self.architecture.layers,
            num_blocks,
            dtype=self._dtype,
            device=self._device,
            kv_cache_dtype=self._kv_cache_dtype,
        )


def _load(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of the network, one at a time."""
    weights = {}
    for name, shape in expected_shapes(checkpoint.architecture).items():
        tensor = to_torch(checkpoint.tensor(name), dtype, device)
        if tuple(tensor.shape) != shape:
            raise ModelFormatError(
                f"Tensor {name!r} is {list(tensor.shape)}, but the architecture makes it {list(shape)}."
            )
        weights[name] = tensor
    return weights


def _refuse_what_does_not_fit(
    architecture: Architecture,
    num_blocks: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDtype,
) -> None:
    weights = sum(math.prod(shape) for shape in expected_shapes(architecture).values())
    weight_bytes = weights * dtype.itemsize
    kv_bytes = num_blocks * sum(kv_block_bytes(group, kv_cache_dtype) for group in architecture.kv_groups)
    if kv_cache_dtype == "auto":
        kv_bytes = kv_bytes * dtype.itemsize // torch.bfloat16.itemsize
    free = free_bytes(device)
    if free is not None and weight_bytes + kv_bytes > free:
        raise OutOfMemoryError(
            f"The model needs {weight_bytes / 2**20:.0f} MiB for its weights and {kv_bytes / 2**20:.0f} MiB "
            f"for the KV cache, but {device} has {free / 2**20:.0f} MiB free: choose a smaller model or KV "
            "cache."
        )
