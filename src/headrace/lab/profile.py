"""Where the time of our own engine's steps goes, beside what the machine could do at most."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.backend.batch import BLOCK_SIZE, Batch, SamplingTable
from headrace.backend.cpu.limits import Limits, measure_limits
from headrace.backend.cpu.profile import OpProfile
from headrace.backend.cpu.runner import open_cpu_runner
from headrace.backend.runner import RunnerSettings
from headrace.errors import ConfigError
from headrace.model.weights import open_checkpoint

if TYPE_CHECKING:
    from headrace.backend.cpu.runner import CpuRunner

_MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class StepKind:
    """A step of ``sequences`` that each bring ``new`` tokens to the ``context`` tokens they have."""

    name: str
    sequences: int
    new: int
    context: int


STEPS = (
    StepKind("decode, 1 sequence", 1, 1, 256),
    StepKind("decode, 16 sequences", 16, 1, 256),
    StepKind("decode, 1 sequence at 4k", 1, 1, 4095),
    StepKind("prefill, 512 tokens", 1, 512, 0),
    StepKind("prefill, 512 more at 1.5k", 1, 512, 1536),
)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One kind of step: mean ``seconds``, in its operations, slowest first.

    ``least_seconds`` of an operation (in the same order): no machine with these limits could do it in less,
    because its weights and KV must be read and its products made.
    """

    step: StepKind
    seconds: float
    operations: tuple[OpProfile, ...]
    least_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's steps on this machine."""

    model: str
    limits: Limits
    steps: tuple[StepProfile, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def profile_model(
    path: Path,
    *,
    name: str,
    threads: int = 0,
    quantization: Literal["int8", "int4"] | None = None,
    seconds: float = 2.0,
    steps: tuple[StepKind, ...] = STEPS,
) -> Profile:
    """Run each kind of step for about ``seconds`` in this process, on random tokens. Decoders only.

    Steps that are longer than the model's context are left out. Raises what opening a checkpoint and loading
    it raise, and ConfigError for encoders.
    """
    checkpoint = open_checkpoint(path, quantization=quantization)
    if checkpoint.architecture.encoder is not None:
        raise ConfigError(f"{name} is an encoder; only the steps of decoders are profiled")
    longest = checkpoint.architecture.max_positions
    steps = tuple(step for step in steps if step.new + step.context <= longest)
    if not steps:
        raise ConfigError(f"{name}: its context of {longest} tokens is shorter than every step to profile")
    blocks = max(step.sequences * _blocks(step) for step in steps)
    settings = RunnerSettings(
        num_blocks=blocks,
        max_batch_tokens=max(step.sequences * step.new for step in steps),
        max_sequences=max(step.sequences for step in steps),
        max_model_len=longest,
        threads=threads,
    )
    runner = open_cpu_runner(checkpoint, settings)
    try:
        limits = measure_limits(runner.capabilities.threads, seconds, isa=runner.capabilities.isa)
        groups = len(checkpoint.architecture.kv_groups)
        vocab = checkpoint.architecture.vocab_size
        found = tuple(_profile(runner, limits, step, groups, vocab, seconds) for step in steps)
    finally:
        runner.close()
    return Profile(name, limits, found)


def least_seconds(operation: OpProfile, limits: Limits, working_set_bytes: float) -> float:
    """The larger of the time to read what an operation reads and the time to multiply what it multiplies.

    The roofline of Williams, Waterman and Patterson (2009), at the bandwidth of the step's working set.
    """
    rates = {
        "int8": limits.int8_macs_per_s,
        "bf16": limits.bf16_macs_per_s,
        "float32": limits.float32_macs_per_s,
    }
    computing = operation.macs / rates[operation.multiplies] if operation.macs else 0.0
    return max(computing, operation.read_bytes / limits.read(working_set_bytes))


def _blocks(step: StepKind) -> int:
    return -(-(step.new + step.context) // BLOCK_SIZE)


def _profile(
    runner: CpuRunner, limits: Limits, step: StepKind, groups: int, vocab: int, seconds: float
) -> StepProfile:
    batch = _batch(step, groups, vocab)
    first = sum(operation.seconds for operation in runner.profile(batch))  # also warms up
    repeats = max(1, min(_MOST_STEPS, int(seconds / max(first, 1e-6))))
    operations = tuple(runner.profile(batch, repeats))
    touched = sum(operation.read_bytes for operation in operations)
    return StepProfile(
        step=step,
        seconds=sum(operation.seconds for operation in operations),
        operations=operations,
        least_seconds=tuple(least_seconds(operation, limits, touched) for operation in operations),
    )


def _batch(step: StepKind, groups: int, vocab: int) -> Batch:
    count, blocks = step.sequences * step.new, _blocks(step)
    positions = np.tile(np.arange(step.context, step.context + step.new, dtype=np.int32), step.sequences)
    sequence = np.repeat(np.arange(step.sequences, dtype=np.int32), step.new)
    query_start = np.arange(0, count + 1, step.new, dtype=np.int32)
    return Batch(
        token_ids=np.random.default_rng(0).integers(0, vocab, count, dtype=np.int32),
        positions=positions,
        query_start=query_start,
        context_len=np.full(step.sequences, step.context + step.new, np.int32),
        slot_mapping=(sequence * (blocks * BLOCK_SIZE) + positions,) * groups,
        block_tables=(np.arange(step.sequences * blocks, dtype=np.int32).reshape(step.sequences, -1),)
        * groups,
        logit_rows=np.ascontiguousarray(query_start[1:] - 1),
        sampling=SamplingTable.greedy(step.sequences),
    )
