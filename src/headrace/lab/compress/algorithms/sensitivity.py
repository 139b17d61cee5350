"""Which layers suffer most: each is narrowed, or left out, alone, and what comes out is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from headrace.lab.compress.algorithms.forward import Rows, embed, load_layer, log_probs, run_layer
from headrace.lab.compress.algorithms.rounding import round_to_nearest
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.plan import Plan, Treatment
from headrace.model.checkpoint import Checkpoint
from headrace.model.store import Progress


def layer_divergence(
    checkpoint: Checkpoint, plan: Plan, sequences: tuple[tuple[int, ...], ...], progress: Progress
) -> list[float]:
    """For each layer the mean KL divergence, in nats per token, of the model in which that layer alone has
    its weights to nearest in their few bits.
    """
    architecture = checkpoint.architecture
    rows = Rows(tuple(map(len, sequences)))

    def narrowed(index: int, weights: Weights, stream: torch.Tensor) -> torch.Tensor:
        narrow = dict(weights)
        for name, treatment in plan.of_layer(index).items():
            if treatment.may_rise:
                narrow[name] = round_to_nearest(weights[name], replace(treatment.scheme, act_order=None))[1]
        return run_layer(architecture, index, narrow, stream, rows, None)

    return _divergence_of_each(checkpoint, sequences, narrowed, progress)


def divergence_without(
    checkpoint: Checkpoint, sequences: tuple[tuple[int, ...], ...], progress: Progress
) -> list[float]:
    """For each layer the mean KL divergence, in nats per token, of the model without that layer."""
    return _divergence_of_each(checkpoint, sequences, lambda index, weights, stream: stream, progress)


def _divergence_of_each(
    checkpoint: Checkpoint,
    sequences: tuple[tuple[int, ...], ...],
    vary: Callable[[int, Weights, torch.Tensor], torch.Tensor],
    progress: Progress,
) -> list[float]:
    """Of the variants in which one layer alone gives what ``vary`` makes of the stream before it.

    One pass over the layers: the residual stream of each variant goes along with the model's own from the
    layer on in which they part. Holds a layer's weights and one stream for each layer, of these sequences.
    """
    architecture = checkpoint.architecture
    rows = Rows(tuple(map(len, sequences)))
    streams = [embed(checkpoint, sequences)]  # the model's own, then those of the variants so far
    for index in range(len(architecture.layers)):
        progress("sensitivity", index, len(architecture.layers))
        weights = load_layer(checkpoint, index)
        variant = vary(index, weights, streams[0])
        streams = [run_layer(architecture, index, weights, stream, rows, None) for stream in streams]
        streams.append(variant)
    progress("sensitivity", len(architecture.layers), len(architecture.layers))
    return _divergences(checkpoint, streams)


def with_bits(plan: Plan, divergence: list[float], sizes: Mapping[str, int]) -> dict[str, Treatment]:
    """The treatments, with 8 bits for the layers that suffer most for their size, as far as the plan's
    ``average_bits`` allow. ``sizes``: elements of each weight."""
    treatments = plan.treatments()
    if plan.average_bits is None:
        return treatments
    rising = {name for name, treatment in treatments.items() if treatment.may_rise}
    room = sum(sizes[name] for name in rising) * (plan.average_bits - 4)
    members: dict[int, list[str]] = {}
    for name in rising:
        members.setdefault(int(name.split(".")[1]), []).append(name)
    cost = {index: 4 * sum(sizes[name] for name in names) for index, names in members.items()}
    for index in sorted(cost, key=lambda index: (-divergence[index] / cost[index], index)):
        if cost[index] <= room:
            room -= cost[index]
            for name in members[index]:
                scheme = replace(treatments[name].scheme, bits=8)
                treatments[name] = replace(treatments[name], scheme=scheme)
    return treatments


def _divergences(checkpoint: Checkpoint, streams: list[torch.Tensor]) -> list[float]:
    """KL of the first stream's distributions to each other's."""
    totals = [0.0] * (len(streams) - 1)
    for own, *others in log_probs(checkpoint, streams):
        for at, other in enumerate(others):
            totals[at] += float((own.exp() * (own - other)).sum(dtype=torch.float64))
    return [max(total, 0.0) / len(streams[0]) for total in totals]
