"""What computes: the protocol every backend implements, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.backend.batch import Batch, StepResult
from headrace.model.architecture import Architecture


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Sizes a runner must be ready for. Filled by the engine before loading."""

    num_blocks: int  # KV blocks in each group, unless group_blocks say otherwise
    max_batch_tokens: int  # n
    max_sequences: int  # r
    max_model_len: int  # longest context of one sequence, in tokens
    max_logit_rows: int = 0  # m; 0 = one a sequence (drafts and prompt logprobs take more)
    threads: int = 0  # 0 = one per usable core
    device: str = "cpu"  # torch backend only
    group_blocks: tuple[int, ...] = ()  # KV blocks of each group; () = num_blocks each
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_logit_rows == 0:
            object.__setattr__(self, "max_logit_rows", self.max_sequences)

    def blocks_of(self, group: int) -> int:
        """KV blocks in one group."""
        return self.group_blocks[group] if self.group_blocks else self.num_blocks


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner promises and how it computes; shown by ``doctor`` and in ``system_fingerprint``."""

    backend: str  # "cpu", "torch", "simulated"
    isa: str  # "avx512", "avx2", "portable", or the device's name
    batch_invariant: bool  # keeps the bit-identity promise of ARCHITECTURE.md
    kv_dtype: str
    threads: int
    fingerprint: str  # build, ISA path, weights, KV format: equal fingerprints give equal tokens


class Runner(Protocol):
    """A loaded model on some device."""

    architecture: Architecture
    capabilities: Capabilities

    def run(self, batch: Batch) -> StepResult:
        """Execute one step: write K and V of every token, sample every logit row. Blocking."""
        ...

    def close(self) -> None:
        """Release weights, KV and threads. The runner is unusable afterwards; closing twice is fine."""
        ...
