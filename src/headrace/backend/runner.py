"""What computes: the protocol every backend implements, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backend.batch import Batch, StepResult
from headrace.backend.kv_format import KVCacheDtype
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
    kv_cache_dtype: KVCacheDtype = "auto"
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
    kv_dtype: str  # what K and V are kept in: "bfloat16", "int8", "float32", …
    threads: int
    fingerprint: str  # build, ISA path, weights, KV format: equal fingerprints give equal tokens


class Runner(Protocol):
    """A loaded model on some device."""

    architecture: Architecture
    capabilities: Capabilities
    block_bytes: tuple[int, ...]  # of one KV block in each group, as read_blocks gives it

    def run(self, batch: Batch) -> StepResult:
        """Execute one step: write K and V of every token, sample every logit row. Blocking.

        The result's arrays hold until the next call.
        """
        ...

    def read_blocks(self, group: int, blocks: list[int]) -> NDArray[np.uint8]:
        """A copy of KV blocks, ``[len(blocks), block_bytes[group]]``, in the backend's own layout.

        Between steps only. What comes back through :meth:`write_blocks`, into any blocks of the group, is
        the same K and V, bit by bit, in every runner of equal ``fingerprint`` and ``block_bytes``.
        """
        ...

    def write_blocks(self, group: int, blocks: list[int], data: NDArray[np.uint8]) -> None:
        """Fill KV blocks with what :meth:`read_blocks` gave. Between steps only."""
        ...

    def close(self) -> None:
        """Release weights, KV and threads. The runner is unusable afterwards; closing twice is fine."""
        ...
