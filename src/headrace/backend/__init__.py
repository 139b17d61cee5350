"""WHAT computes: cpu (records a native program), torch (oracle and GPU), simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.backend.runner import Runner, RunnerSettings
    from headrace.model.checkpoint import Checkpoint

__all__ = ["open_runner"]


def open_runner(checkpoint: Checkpoint, backend: str, settings: RunnerSettings) -> Runner:
    """Load ``checkpoint`` on ``backend``: ``cpu`` or ``torch``. Only the chosen backend is imported.

    Raises ConfigError for another name, or for a backend that is not installed, and what loading raises
    (ModelFormatError, OutOfMemoryError).
    """
    if backend == "cpu":
        from headrace.backend.cpu.runner import open_cpu_runner

        return open_cpu_runner(checkpoint, settings)
    if backend == "torch":
        from headrace.backend.torch import open_torch_runner

        return open_torch_runner(checkpoint, settings)
    raise ConfigError(f"There is no backend {backend!r}: choose 'cpu' or 'torch'.")
