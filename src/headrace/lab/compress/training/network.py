"""The decoder, run whole over sequences so that gradients flow: the same definition that is served."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.lab.compress.algorithms.forward import SequenceOps, whole_sequences
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.model.architecture import Architecture
from headrace.model.decoder import decode_layer

Sequences = Sequence[Sequence[int]]


def run_layers(
    architecture: Architecture, weights: Weights, sequences: Sequences, *, bf16: bool = False
) -> list[torch.Tensor]:
    """The residual stream ``[rows, hidden]`` after each layer, float32; sequences lie one behind the other.

    ``weights``: float32, by canonical name; with ``bf16`` matrices may be bfloat16, and are multiplied so.
    Norms, softmax and the residual stream keep float32.
    """
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    step = whole_sequences([len(sequence) for sequence in sequences], ids)
    ops = SequenceOps(weights, step, None)
    streams = []
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        x = ops.embed("embed", scale=architecture.embedding_scale)
        x = x.float() if x.dtype == torch.bfloat16 else x
        for index, layer in enumerate(architecture.layers):
            x = decode_layer(ops, x, layer, index)
            streams.append(x)
    return streams


def narrowed(tensor: torch.Tensor, bf16: bool) -> torch.Tensor:
    """A matrix that is not trained, as it is multiplied: cast once, where autocast would do it every time."""
    return tensor.detach().bfloat16() if bf16 and tensor.ndim == 2 else tensor.detach()
