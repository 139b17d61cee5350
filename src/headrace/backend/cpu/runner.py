"""CpuRunner: a recorded program, its memory, and one native call per step."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace
from headrace.backend.batch import Batch, StepResult, pooled
from headrace.backend.cpu import _native
from headrace.backend.cpu.cores import usable_cores
from headrace.backend.cpu.graph import network_graph
from headrace.backend.cpu.instruction import INSTRUCTION
from headrace.backend.cpu.kv_blocks import KvBlocks
from headrace.backend.cpu.pages import zeros
from headrace.backend.cpu.profile import OpProfile, profile_of
from headrace.backend.cpu.recorder import record
from headrace.backend.cpu.weights_file import packed_weights
from headrace.backend.kv_format import KVCacheDtype, check_kv_cache_dtype, kv_block_bytes
from headrace.backend.runner import Capabilities, RunnerSettings
from headrace.errors import ConfigError, EngineDeadError
from headrace.model.checkpoint import Checkpoint

MAX_THREADS = 256
_SPARE = 64  # vector loads may reach this far past the last block


def chosen_isa() -> str:
    """The kernel path in use: ``HEADRACE_ISA`` if set, else the best that this CPU has.

    Raises ConfigError if HEADRACE_ISA names a path that cannot run here.
    """
    have: list[str] = _native.supported_isas()
    wanted = os.environ.get("HEADRACE_ISA", "") or have[0]
    if wanted not in have:
        raise ConfigError(f"HEADRACE_ISA={wanted} cannot run here; this machine has: {', '.join(have)}")
    return wanted


_ANY_BYTE = 0x3C  # numbers of about 0.01 in every format of keys, values and scales


class CpuRunner:
    """Implements headrace.backend.runner.Runner on native kernels. One step at a time."""

    def __init__(self, checkpoint: Checkpoint, settings: RunnerSettings) -> None:
        isa = chosen_isa()
        threads = settings.threads or usable_cores()
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads must be between 1 and {MAX_THREADS}, got {threads}")
        check_kv_cache_dtype(settings.kv_cache_dtype)
        kv_dtype: KVCacheDtype = "int8" if settings.kv_cache_dtype == "int8" else "bfloat16"
        self.architecture = arch = checkpoint.architecture
        nodes = network_graph(arch)
        weights = packed_weights(checkpoint, nodes)
        recording = record(nodes, arch, weights.tensors, settings, _native.quant_row_bytes)
        block_bytes = [kv_block_bytes(group, kv_dtype) for group in arch.kv_groups]

        self._scratch = zeros(recording.scratch_bytes, large=False)  # rarely used whole
        for offset, values in recording.constants:
            self._scratch[offset : offset + values.nbytes] = values.view(np.uint8)
        output_end = recording.output_offset + settings.max_logit_rows * recording.output_stride
        flat = self._scratch[recording.output_offset : output_end].view(np.float32)
        width = arch.vocab_size if arch.encoder is None else arch.hidden_size
        self._output = flat.reshape(settings.max_logit_rows, -1)[:, :width]

        assert INSTRUCTION.itemsize == _native.INSTRUCTION_BYTES
        self._instructions = recording.instructions
        self._result: StepResult | None = None
        self._program: Any = _native.Program(
            recording.instructions.tobytes(),
            max_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
            max_logit_rows=settings.max_logit_rows,
            max_positions=settings.max_model_len,
            vocab=arch.vocab_size,
            block_bytes=block_bytes,
            isa=isa,
            threads=threads,
        )
        self._kv = [
            zeros(settings.blocks_of(g) * size + _SPARE, large=True) for g, size in enumerate(block_bytes)
        ]
        self._program.bind([weights.data, self._scratch, *self._kv])
        self._blocks = [
            KvBlocks(pool[:-_SPARE], settings.blocks_of(g), group, kv_dtype)
            for g, (pool, group) in enumerate(zip(self._kv, arch.kv_groups, strict=True))
        ]
        self.block_bytes = tuple(blocks.block_bytes for blocks in self._blocks)
        assert self.block_bytes == tuple(block_bytes)
        material = f"{headrace.__version__} {isa} {checkpoint.fingerprint()} {kv_dtype}"
        self.capabilities = Capabilities(
            backend="cpu",
            isa=isa,
            batch_invariant=True,
            kv_dtype=kv_dtype,
            threads=threads,
            fingerprint=hashlib.sha256(material.encode()).hexdigest()[:16],
        )

    def run(self, batch: Batch) -> StepResult:
        """One native call. Raises ValueError for a batch that points outside of the runner's memory."""
        if self._program is None:
            raise EngineDeadError("The runner is closed.")
        result = self._result_for(len(batch.logit_rows), max([0, *batch.sampling.num_logprobs.tolist()]))
        self._program.run(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.context_len,
            batch.slot_mapping,
            batch.block_tables,
            batch.logit_rows,
            batch.sampling,
            result.token_ids,
            result.logprobs,
            result.top_ids,
            result.top_logprobs,
            result.failed.view(np.uint8),
        )
        if self.architecture.encoder is not None:
            return pooled(self._output[: len(batch.context_len)].copy())
        return result

    def _result_for(self, rows: int, top: int) -> StepResult:
        """Where a step's results go: where the last one's went, if it had as many."""
        result = self._result
        if result is None or result.top_ids.shape != (rows, top):
            result = self._result = StepResult(
                token_ids=np.empty(rows, np.int32),
                logprobs=np.empty(rows, np.float32),
                top_ids=np.empty((rows, top), np.int32),
                top_logprobs=np.empty((rows, top), np.float32),
                failed=np.empty(rows, np.bool_),
            )
        if top:
            result.top_ids.fill(-1)
            result.top_logprobs.fill(np.nan)
        return result

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """Run a step and copy its logits ``[m, vocab]``; bias, penalties and masks, if any, are in them."""
        self.run(batch)
        return self._output[: len(batch.logit_rows)].copy()

    def profile(self, batch: Batch, steps: int = 1) -> list[OpProfile]:
        """Run ``batch`` so many times: what each kind of operation took, slowest first. Overwrites all KV."""
        for pool in self._kv:  # pages that nobody has written are all one page, which stays in the cache
            pool.fill(_ANY_BYTE)
        self._program.set_profiling(True)
        self._program.take_profile()
        try:
            for _ in range(steps):
                self.run(batch)
            return profile_of(self._instructions, self._program.take_profile(), batch, steps)
        finally:
            self._program.set_profiling(False)

    def read_blocks(self, group: int, blocks: list[int]) -> NDArray[np.uint8]:
        """See :meth:`Runner.read_blocks`."""
        return self._blocks[group].read(blocks)

    def write_blocks(self, group: int, blocks: list[int], data: NDArray[np.uint8]) -> None:
        """See :meth:`Runner.write_blocks`."""
        self._blocks[group].write(blocks, data)

    def close(self) -> None:
        """Release threads, weights and KV."""
        self._program = None
        self._kv, self._blocks = [], []
        self._scratch = self._output = np.empty(0, np.uint8)


def open_cpu_runner(checkpoint: Checkpoint, settings: RunnerSettings) -> CpuRunner:
    """Load a checkpoint: map its packed weights (packing them first if need be) and record the program.

    Raises ModelFormatError for tensors that do not fit the architecture, ConfigError for bad settings.
    """
    return CpuRunner(checkpoint, settings)
