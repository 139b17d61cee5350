"""headrace: serve large language models fast, cheaply and dependably; measure first, then optimise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.config import (
        CacheConfig,
        CheckpointConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
    )
    from headrace.engine.request import SamplingParams, StructuredOutputs
    from headrace.frontend.beam_search import BeamSearchParams
    from headrace.frontend.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CacheConfig",
    "CheckpointConfig",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputs",
    "__version__",
]

_HOMES = {
    "LLM": "headrace.frontend.llm",
    "BeamSearchParams": "headrace.frontend.beam_search",
    "SamplingParams": "headrace.engine.request",
    "StructuredOutputs": "headrace.engine.request",
    "ModelConfig": "headrace.engine.config",
    "CacheConfig": "headrace.engine.config",
    "CheckpointConfig": "headrace.engine.config",
    "SchedulerConfig": "headrace.engine.config",
    "SpeculativeConfig": "headrace.engine.config",
}


def __getattr__(name: str) -> Any:
    """Import the public names where they live, on first use: ``import headrace`` itself stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
