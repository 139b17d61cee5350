"""Who learns: a model of floats, opened from a folder, cut out of its teacher, or new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.model.architecture import Architecture
from headrace.model.checkpoint import Checkpoint
from headrace.model.weights.tensor_shapes import expected_shapes

_SPREAD = 0.02  # of new weights, as GPT-2 has it; those that write to the residual stream get less


class Student(Protocol):
    """``parameters`` are what is trained, float32 leaves in a fixed order."""

    architecture: Architecture
    parameters: dict[str, torch.Tensor]

    def weights(self) -> Weights:
        """The network's tensors by canonical name, made of the parameters so that gradients flow."""
        ...

    def rate(self, name: str) -> float:
        """What the learning rate of a parameter is multiplied by."""
        ...

    def round(self) -> None:
        """Make of the parameters what the file will hold."""
        ...


@dataclass(eq=False)
class FloatStudent:
    """All of the model is trained; without ``embeddings`` all but the embedding table and the head.

    ``tensors`` are float32 and become the student's own.
    """

    architecture: Architecture
    tensors: Weights
    embeddings: bool = True
    parameters: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = {
            name: self.tensors[name].requires_grad_()
            for name in expected_shapes(self.architecture)
            if self.embeddings or not name.startswith(("embed.", "head."))
        }

    def weights(self) -> Weights:
        """See Student."""
        return self.tensors

    def rate(self, name: str) -> float:
        """See Student."""
        return 1.0

    def round(self) -> None:
        """To bfloat16; Gemma's norms as its files hold them, without the one."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                one = float(self.architecture.family == "gemma3" and "norm" in name)
                tensor.copy_((tensor - one).bfloat16().float() + one)


class StudentTensors(Mapping[str, NDArray[np.float32]]):
    """A student's weights as the writers of formats take them, in the network's order."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self._weights = weights
        self._names = list(expected_shapes(architecture))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._weights[name].detach().numpy()
        return array


def of_layers(architecture: Architecture, layers: Sequence[int]) -> Architecture:
    """A network of some of another's layers, in that order; KV groups are counted from 0 again."""
    groups: dict[int | None, int] = {}  # by window, in the order in which they first occur
    chosen = []
    for index in layers:
        layer = architecture.layers[index]
        group = groups.setdefault(layer.attention.window, len(groups))
        chosen.append(replace(layer, kv_group=group))
    return replace(architecture, layers=tuple(chosen))


def copied_weights(architecture: Architecture, weights: Weights, layers: Sequence[int]) -> Weights:
    """The weights of :func:`of_layers`: copies of the whole network's ``weights``."""
    found: Weights = {}
    for name in expected_shapes(of_layers(architecture, layers)):
        source = name
        if name.startswith("layers."):
            _, place, rest = name.split(".", 2)
            source = f"layers.{layers[int(place)]}.{rest}"
        found[name] = weights[source].clone()
    return found


def new_weights(architecture: Architecture, seed: int) -> Weights:
    """Random weights of a model that knows nothing: normal, norms of one, biases of zero.

    Those that write to the residual stream are divided by the root of how many do (Radford et al., "Language
    Models are Unsupervised Multitask Learners", 2019).
    """
    draw = torch.Generator().manual_seed(seed)
    writers = (2 * len(architecture.layers)) ** 0.5
    found: Weights = {}
    for name, shape in expected_shapes(architecture).items():
        if len(shape) == 1:
            found[name] = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            continue
        spread_here = _SPREAD / (writers if name.endswith((".o.weight", ".down.weight")) else 1.0)
        found[name] = torch.empty(shape).normal_(0.0, spread_here, generator=draw)
    return found


def layer_pairs(ours: Architecture, teacher: Architecture, layers: Sequence[int] | None) -> dict[int, int]:
    """Which of the teacher's layers each of the student's is compared with, behind it.

    ``layers``: of the teacher, those that the student has: each stands for those that were cut out behind it,
    too. None: evenly.
    """
    count = len(ours.layers)
    if layers is not None:
        return {place: after - 1 for place, after in enumerate([*layers[1:], len(teacher.layers)])}
    return {place: round((place + 1) * len(teacher.layers) / count) - 1 for place in range(count)}


def require_same_vocabulary(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise ConfigError unless ids mean the same to both."""
    ours, theirs = student.architecture.vocab_size, teacher.architecture.vocab_size
    why = f"it has {ours} tokens, the teacher {theirs}" if ours != theirs else None
    if why is None:
        why = load_tokenizer(student.path).difference(load_tokenizer(teacher.path))
    if why is not None:
        raise ConfigError(
            f"{student.path} has another vocabulary than the teacher ({why}): a student learns from the "
            "logits of each token, so choose one with the same tokenizer."
        )
