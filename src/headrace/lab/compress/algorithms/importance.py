"""What of a model shows least in its activations: layers, channels, heads, features of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.lab.compress.algorithms.forward import Rows, embed, load_layer, run_layer
from headrace.lab.compress.algorithms.scaling import Weights
from headrace.lab.compress.algorithms.statistics import Inputs, LayerInputs
from headrace.lab.compress.calibration import Calibration
from headrace.lab.compress.cut import Cut, Places
from headrace.lab.compress.shape import Shape, shape_of
from headrace.lab.compress.work import Work
from headrace.model.architecture import AttentionSpec
from headrace.model.checkpoint import Checkpoint
from headrace.model.store import Progress

_NORMS = ("attention_norm", "feed_forward_norm")


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of a whole model, over a calibration; arrays are float32 ``[layers, …]``.

    ``influence``: of each layer ``1 - cos`` of the stream before and after it, the mean over tokens.
    ``channels``, ``kv_heads``: the energy that each gives to the stream. ``hidden``: the mean absolute value
    of each feature behind the norms. ``moments``: by norm ``[hidden]``, the mean square of each feature of
    the stream, where the mean over features is 1.
    """

    influence: tuple[float, ...]
    channels: NDArray[np.float32]
    kv_heads: NDArray[np.float32]
    hidden: NDArray[np.float32]
    moments: dict[str, NDArray[np.float32]]


def look(checkpoint: Checkpoint, calibration: Calibration, work: Work, progress: Progress) -> Scores:
    """One pass over the layers. What is seen of each is kept in ``work``, from which a killed run goes on.

    Raises GenerationError for a model whose values are not finite.
    """
    architecture = checkpoint.architecture
    layers = len(architecture.layers)
    rows = Rows(tuple(map(len, calibration.sequences)))
    begin = work.finished()
    if begin <= layers:
        kept = work.stream(begin)
        assert begin == 0 or kept is not None  # a layer is finished only when the stream after it is kept
        stream = embed(checkpoint, calibration.sequences) if kept is None else torch.from_numpy(kept)
        for index in range(begin, layers):
            progress("looking", index, layers)
            weights, inputs = load_layer(checkpoint, index), LayerInputs()
            after = run_layer(architecture, index, weights, stream, rows, inputs.see)
            influence = 1 - torch.cosine_similarity(stream, after).mean(dtype=torch.float64)
            seen = _layer(weights, inputs, architecture.layers[index].attention)
            work.keep_stream(index + 1, after.numpy())
            work.keep_layer(index, {}, seen, {"influence": float(influence)})
            stream = after
        unit = stream / stream.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)
        work.keep_layer(layers, {}, {"final_norm": unit.square().mean(0).numpy()}, {})
    progress("looking", layers, layers)
    return _collected(work, layers)


def _layer(weights: Weights, inputs: LayerInputs, spec: AttentionSpec) -> dict[str, NDArray[np.float32]]:
    down, o = weights["feed_forward.down.weight"], weights["attention.o.weight"]
    inside, mixed = inputs.sites["feed_forward.up"], inputs.sites["attention.v"]
    found = {
        "channels": inside.gram.diagonal() * down.square().sum(0),
        "kv_heads": _head_energy(o, mixed, spec),
        "hidden": inputs.sites[_NORMS[0]].mean + inputs.sites[_NORMS[1]].mean,
    }
    for norm in _NORMS:
        found[norm] = _moments(inputs.sites[norm], weights[f"{norm}.weight"])
    return {name: values.contiguous().numpy() for name, values in found.items()}


def _head_energy(o: torch.Tensor, seen: Inputs, spec: AttentionSpec) -> torch.Tensor:
    """``|x_g @ o_g.T| ** 2`` over all rows, of each group ``g`` of heads that share a key and value head."""
    width = spec.head_dim * spec.heads // spec.kv_heads
    energy = []
    for group in range(spec.kv_heads):
        mine = slice(group * width, (group + 1) * width)
        energy.append(((o[:, mine] @ seen.gram[mine, mine]) * o[:, mine]).sum())
    return torch.stack(energy)


def _moments(seen: Inputs, norm: torch.Tensor) -> torch.Tensor:
    """Mean squares before the norm's weight; of features that the weight drops nothing is known: 1."""
    squares = seen.gram.diagonal() / max(seen.rows, 1)
    return torch.where(norm != 0, squares / norm.square(), torch.ones_like(squares))


def _collected(work: Work, layers: int) -> Scores:
    influence, arrays = [], []
    moments: dict[str, NDArray[np.float32]] = {}
    for index in range(layers):
        kept, remarks = work.layer(index)
        seen: dict[str, Any] = dict(kept)
        influence.append(float(remarks["influence"]))
        arrays.append(seen)
        moments |= {f"layers.{index}.{norm}.weight": seen[norm] for norm in _NORMS}
    last: dict[str, Any] = dict(work.layer(layers)[0])
    moments["final_norm.weight"] = last["final_norm"]

    def stacked(name: str) -> NDArray[np.float32]:
        return np.stack([seen[name] for seen in arrays])

    return Scores(tuple(influence), stacked("channels"), stacked("kv_heads"), stacked("hidden"), moments)


def make_cut(checkpoint: Checkpoint, scores: Scores, cost: Sequence[float], shape: Shape) -> Cut:
    """What stays of the model in ``shape``: the layers that cost most if they are left out, and of those what
    scores highest."""
    old = shape_of(checkpoint.architecture)
    stay = tuple(sorted(np.argsort(-np.asarray(cost), kind="stable")[: shape.layers].tolist()))
    hidden = _highest(scores.hidden[list(stay)].sum(0), shape.hidden)
    norms = {}
    if shape.hidden < old.hidden:
        for name, moments in scores.moments.items():
            norms[name] = float(np.sqrt(max(moments[hidden].mean(), 1e-6)))
    return Cut(
        stay,
        tuple(_highest(scores.channels[layer], shape.feed_forward) for layer in stay),
        tuple(_highest(scores.kv_heads[layer], shape.kv_heads) for layer in stay),
        hidden,
        norms,
    )


def _highest(values: NDArray[np.float32], count: int) -> Places:
    return np.sort(np.argsort(-values, kind="stable")[:count])
