"""Who tells the student what is right: the model itself, or what it said, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from headrace.backend.torch.device import to_torch
from headrace.errors import ConfigError, ModelFormatError
from headrace.lab.compress.algorithms.forward import head_logits
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.formats.shards import Shards
from headrace.lab.compress.training.losses import Distribution, Targets
from headrace.lab.compress.training.network import Sequences, narrowed, run_layers
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights.safetensors_file import SafetensorsFile

_ABOUT = "about.json"
_WEIGHTS = "model.safetensors"  # as Shards calls its only file


class Teacher(Protocol):
    """Asked for sequences by their numbers in the training data."""

    def targets(self, numbers: Sequence[int]) -> Targets:
        """What it says of them, one behind the other."""
        ...


@dataclass(frozen=True, slots=True)
class LiveTargets:
    """Logits made from the last residual stream when they are asked for."""

    architecture: Architecture
    weights: Weights
    streams: list[torch.Tensor]
    temperature: float
    top_k: int | None
    bf16: bool

    def rows(self, start: int, stop: int) -> Distribution:
        """See Targets."""
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                logits = head_logits(self.architecture, self.weights, self.streams[-1][start:stop]).float()
            log_probs = (logits / self.temperature).log_softmax(-1)
            if self.top_k is None:
                return Distribution(log_probs)
            best = log_probs.topk(self.top_k)
            return Distribution(best.values, best.indices)


@dataclass(eq=False)
class LiveTeacher:
    """The model, its ``weights`` in float32. ``top_k``: only so many likeliest tokens are told.

    ``bf16``: it keeps matrices in bfloat16 and multiplies them so. ``hidden``: the residual streams of all
    layers are told, not the last one's alone.
    """

    architecture: Architecture
    weights: Weights
    sequences: Sequences
    temperature: float = 1.0
    top_k: int | None = None
    bf16: bool = False
    hidden: bool = False

    def __post_init__(self) -> None:
        self.weights = {name: narrowed(tensor, self.bf16) for name, tensor in self.weights.items()}

    def targets(self, numbers: Sequence[int]) -> LiveTargets:
        """See Teacher."""
        with torch.no_grad():
            some = [self.sequences[number] for number in numbers]
            streams = run_layers(self.architecture, self.weights, some, bf16=self.bf16)
        told = streams if self.hidden else streams[-1:]
        return LiveTargets(self.architecture, self.weights, told, self.temperature, self.top_k, self.bf16)


@dataclass(frozen=True, slots=True)
class StoredTargets:
    """The likeliest tokens as they were kept."""

    ids: torch.Tensor
    log_probs: torch.Tensor
    streams: tuple[torch.Tensor, ...] = ()

    def rows(self, start: int, stop: int) -> Distribution:
        """See Targets."""
        return Distribution(self.log_probs[start:stop], self.ids[start:stop])


class StoredTeacher:
    """The folder of a teacher's likeliest tokens, as :func:`store` wrote it; a view of its file.

    ``about``: what it must have been made of. Raises ConfigError if it was made of something else.
    """

    def __init__(self, folder: Path, about: dict[str, Any], sequences: Sequences) -> None:
        try:
            kept = json.loads((folder / _ABOUT).read_bytes())
            file = SafetensorsFile(folder / _WEIGHTS)
            self._ids, self._log_probs = file.read("ids"), file.read("log_probs")
        except (OSError, ValueError, KeyError, ModelFormatError) as error:
            raise ConfigError(
                f"{folder} holds no stored logits that can be read ({error}): remove it to make them anew."
            ) from None
        different = [key for key in about if kept.get(key) != about[key]]
        rows = sum(map(len, sequences))
        if different or self._ids.shape != (rows, about["top_k"]) or self._ids.shape != self._log_probs.shape:
            raise ConfigError(
                f"The logits in {folder} are of another {', '.join(different) or 'number of tokens'}: "
                "name another folder, or remove it."
            )
        if self._ids.size and not 0 <= int(self._ids.min()) <= int(self._ids.max()) < about["vocab_size"]:
            raise ConfigError(f"{folder} holds tokens that the vocabulary has not: remove it.")
        self._starts = np.cumsum([0, *map(len, sequences)])

    def targets(self, numbers: Sequence[int]) -> StoredTargets:
        """See Teacher."""
        spans = [slice(self._starts[number], self._starts[number + 1]) for number in numbers]
        ids = np.concatenate([self._ids[span] for span in spans])
        log_probs = np.concatenate([self._log_probs[span] for span in spans])
        return StoredTargets(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(log_probs).float())


def store(
    draft: Path,
    teacher: LiveTeacher,
    about: dict[str, Any],
    advance: Callable[[int, int], None],
) -> None:
    """Write the teacher's likeliest tokens of all its sequences into the folder ``draft``, row by row:
    ``ids`` int32 and ``log_probs`` float32, ``[rows, k]``. ``advance`` is told of sequences done, and all."""
    assert teacher.top_k is not None
    shape = sum(map(len, teacher.sequences)), teacher.top_k
    # Whole from the start: small arrays that stay, made between logits that go, keep the memory of all these.
    ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    row = 0
    for number in range(len(teacher.sequences)):
        advance(number, len(teacher.sequences))
        targets = teacher.targets([number])
        for start in range(0, len(teacher.sequences[number]), 128):
            found = targets.rows(start, min(start + 128, len(teacher.sequences[number])))
            assert found.ids is not None
            some = slice(row, row + len(found.ids))
            ids[some], log_probs[some] = found.ids.numpy(), found.log_probs.numpy()
            row = some.stop
    with Shards(draft, 2, shard_bytes=1 << 62) as shards:
        shards.add("ids", ids)
        shards.add("log_probs", log_probs)
    (draft / _ABOUT).write_text(json.dumps(about, indent=1), "utf-8")
    advance(len(teacher.sequences), len(teacher.sequences))


def float_weights(checkpoint: Checkpoint) -> Weights:
    """All tensors in float32, dequantised where need be."""
    device = torch.device("cpu")
    return {name: to_torch(checkpoint.tensor(name), torch.float32, device) for name in checkpoint.names()}
