"""The torch backend: executes a definition eagerly; the float32 oracle, and any torch device (experimental).

Importing this package does not import torch; :func:`open_torch_runner` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.backend.batch import Float32
    from headrace.backend.runner import RunnerSettings
    from headrace.backend.torch.runner import TorchRunner
    from headrace.model.checkpoint import Checkpoint

__all__ = ["open_torch_runner", "reference_logits"]


def open_torch_runner(checkpoint: Checkpoint, settings: RunnerSettings) -> TorchRunner:
    """Load a checkpoint onto ``settings.device``.

    Raises ConfigError when torch is not installed or the device cannot be used, OutOfMemoryError when the
    model does not fit, ModelFormatError when its weights are bad.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "The torch backend needs PyTorch, which is not installed: pip install 'headrace[gpu]'."
        ) from error
    from headrace.backend.torch.runner import TorchRunner

    return TorchRunner(checkpoint, settings)


def reference_logits(checkpoint: Checkpoint, token_ids: list[int]) -> Float32:
    """Float32 logits ``[len, vocab]`` after every prefix of ``token_ids``: the oracle of other backends.

    Loads the model for one sequence; for many, keep a runner and call its ``sequence_logits``.
    """
    from headrace.backend.runner import RunnerSettings

    settings = RunnerSettings(
        num_blocks=0, max_batch_tokens=len(token_ids), max_sequences=1, max_model_len=len(token_ids)
    )
    runner = open_torch_runner(checkpoint, settings)
    try:
        return runner.sequence_logits(token_ids)
    finally:
        runner.close()
