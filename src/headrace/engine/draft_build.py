"""From settings to a draft model beside another: its sizes, and what it must be able to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backend.batch import BLOCK_SIZE
from headrace.backend.runner import RunnerSettings
from headrace.engine.config import SpeculativeConfig
from headrace.engine.kv_cache import blocks_for
from headrace.engine.memory import block_bytes
from headrace.errors import ConfigError
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from headrace.engine.draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model that is known to fit, and not loaded yet."""

    checkpoint: Checkpoint
    quantization: str | None
    settings: RunnerSettings

    def open(self, backend: str, vocab_size: int, prefix_caching: bool) -> DraftModel:
        """Load it. ``vocab_size``: of the model that verifies. Raises as ``open_runner`` does."""
        from headrace.backend import open_runner
        from headrace.engine.draft_model import DraftModel

        runner = open_runner(self.checkpoint, backend, self.settings)
        return DraftModel(runner, self.settings, vocab_size=vocab_size, prefix_caching=prefix_caching)


def plan_draft(
    speculative: SpeculativeConfig | None, target: Architecture, settings: RunnerSettings
) -> DraftPlan | None:
    """The draft model that ``speculative`` asks for, if any, for a ``target`` opened with ``settings``.

    Raises ConfigError for a model that cannot draft or a pool without a block, and what opening its
    checkpoint raises.
    """
    if speculative is None or speculative.method != "draft_model":
        return None
    from headrace.model.weights import open_checkpoint

    # a head takes most of a small draft's time, and its errors cost drafts, never an answer
    narrow = "int4-all" if speculative.quantization == "int4" else speculative.quantization
    checkpoint = open_checkpoint(Path(str(speculative.model)), quantization=narrow)
    architecture = checkpoint.architecture
    if architecture.encoder is not None or target.encoder is not None:
        raise ConfigError(
            "Encoders neither draft nor take drafts: leave speculative_config out.", param="model"
        )
    longest = min(settings.max_model_len, architecture.max_positions)
    num_blocks = min(settings.num_blocks, settings.max_sequences * blocks_for(longest))
    if speculative.kv_cache_memory_bytes is not None:
        size = block_bytes(architecture, settings.kv_cache_dtype)
        num_blocks = min(num_blocks, speculative.kv_cache_memory_bytes // size)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes of speculative_config is {speculative.kv_cache_memory_bytes}, but "
                f"one block of {BLOCK_SIZE} tokens takes {size} bytes with the draft model: give at least "
                "that, better enough for all its sequences.",
                param="kv_cache_memory_bytes",
            )
    return DraftPlan(
        checkpoint,
        speculative.quantization,
        replace(
            settings,
            num_blocks=num_blocks,
            group_blocks=(),
            max_model_len=min(longest, num_blocks * BLOCK_SIZE),
            max_logit_rows=settings.max_sequences,
        ),
    )
