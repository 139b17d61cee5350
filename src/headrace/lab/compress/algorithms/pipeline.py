"""A model's layers, one after the other: load, look at what goes in, compress, keep, go on."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from headrace.lab.compress.algorithms.forward import Rows, embed, load_layer, run_layer
from headrace.lab.compress.algorithms.layer import LayerResult, compress_layer
from headrace.lab.compress.algorithms.rounding import require_finite, round_to_nearest
from headrace.lab.compress.algorithms.sensitivity import layer_divergence, with_bits
from headrace.lab.compress.algorithms.statistics import CacheReach, LayerInputs
from headrace.lab.compress.calibration import Calibration
from headrace.lab.compress.plan import Plan, Pruning, Treatment
from headrace.lab.compress.recipe import Recipe
from headrace.lab.compress.targets import HEAD
from headrace.lab.compress.work import Work
from headrace.model.checkpoint import Checkpoint
from headrace.model.store import Progress

SENSITIVITY_TOKENS = 1024
"""Of the calibration, that tell which layers suffer most; every variant of the model reads them."""
SEARCH_ROWS = 512
"""Of each input, about, on which SmoothQuant's alpha is searched for."""


def run(
    checkpoint: Checkpoint,
    recipe: Recipe,
    plan: Plan,
    calibration: Calibration | None,
    work: Work,
    *,
    threads: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Finish the layers of ``work`` that are not finished, and the head if the recipe rounds it.

    In memory are one layer's weights in float32 with what is searched for them, and the residual streams of
    the calibration before and after it. With GPTQ and pruning each layer sees what the compressed ones before
    it give; without, what the model's own give. Raises ModelFormatError and GenerationError for a model whose
    numbers are not finite, naming the layer.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        treatments = _treatments(checkpoint, plan, calibration, work, progress)
        layers = len(checkpoint.architecture.layers)
        begin = work.finished()
        stream, rows = None, Rows(())
        if calibration is not None and begin < layers:
            rows = Rows(tuple(map(len, calibration.sequences)))
            stream = _stream(checkpoint, calibration, work, begin)
        for index in range(begin, layers):
            progress("layers", index, layers)
            stream = _layer(checkpoint, recipe, treatments, plan.prunings(), index, stream, rows, work)
        progress("layers", layers, layers)
        if f"{HEAD}.weight" in treatments and work.finished() == layers:
            _head(checkpoint, treatments[f"{HEAD}.weight"], work, layers)


def _treatments(
    checkpoint: Checkpoint, plan: Plan, calibration: Calibration | None, work: Work, progress: Progress
) -> dict[str, Treatment]:
    if plan.average_bits is None:
        return plan.treatments()
    assert calibration is not None  # a recipe with average_bits is calibrated
    found = work.value("sensitivity")
    if found is None:
        found = layer_divergence(checkpoint, plan, some_sequences(calibration, SENSITIVITY_TOKENS), progress)
        work.keep_value("sensitivity", found)
    return with_bits(plan, found, {one.name: math.prod(one.shape) for one in plan.tensors})


def some_sequences(calibration: Calibration, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Sequences from all over the calibration, of about so many ``tokens`` in all."""
    few = max(1, tokens * len(calibration.sequences) // max(calibration.tokens, 1))
    stride = max(1, len(calibration.sequences) // few)
    return calibration.sequences[::stride][:few]


def _stream(checkpoint: Checkpoint, calibration: Calibration, work: Work, begin: int) -> torch.Tensor:
    kept = work.stream(begin)
    if kept is not None:
        return torch.from_numpy(kept)
    assert begin == 0  # a layer is finished only when the stream after it is kept
    return embed(checkpoint, calibration.sequences)


def _layer(
    checkpoint: Checkpoint,
    recipe: Recipe,
    treatments: dict[str, Treatment],
    prunings: dict[str, Pruning],
    index: int,
    stream: torch.Tensor | None,
    rows: Rows,
    work: Work,
) -> torch.Tensor | None:
    """Finish one layer; the stream after it."""
    began = time.monotonic()
    architecture = checkpoint.architecture
    prefix = f"layers.{index}."
    mine = {name.removeprefix(prefix): one for name, one in treatments.items() if name.startswith(prefix)}
    pruned = {name.removeprefix(prefix): one for name, one in prunings.items() if name.startswith(prefix)}
    weights = load_layer(checkpoint, index)
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            require_finite(prefix + name, tensor)
    inputs, after = None, None
    if stream is not None:
        searched = recipe.smoothquant is not None and recipe.smoothquant.alpha is None
        inputs = LayerInputs(max(1, rows.count // SEARCH_ROWS) if searched else 0)
        after = run_layer(architecture, index, weights, stream, rows, inputs.see)
    result = compress_layer(weights, inputs, architecture.layers[index], mine, pruned, recipe)
    reach = CacheReach() if recipe.kv_cache else None
    if stream is not None:
        passed_on = pruned or any(one.method == "gptq" for one in mine.values())
        if passed_on or reach is not None:
            see = None if reach is None else reach.see
            compressed = run_layer(architecture, index, weights, stream, rows, see)
            after = compressed if passed_on else after
        assert after is not None
        work.keep_stream(index + 1, after.numpy())
    work.keep_layer(
        index,
        {prefix + name: linear for name, linear in result.rounded.items()},
        {prefix + name: tensor for name, tensor in result.changed.items()},
        _remarks(result, prefix, mine)
        | {"kv_scales": None if reach is None else reach.scales()}
        | {"seconds": round(time.monotonic() - began, 2)},
    )
    return after


def _remarks(result: LayerResult, prefix: str, treatments: dict[str, Treatment]) -> dict[str, Any]:
    return {
        "notes": [f"{prefix}{note}" for note in result.notes],
        "errors": {prefix + name: error for name, error in result.errors.items()},
        "zeros": {prefix + name: share for name, share in result.zeros.items()},
        "bits": {prefix + name: one.scheme.bits for name, one in treatments.items()},
    }


def _head(checkpoint: Checkpoint, treatment: Treatment, work: Work, place: int) -> None:
    """The head, which goes behind the layers."""
    from headrace.backend.torch.device import to_torch

    name = f"{HEAD}.weight"
    matrix = to_torch(checkpoint.tensor(name), torch.float32, torch.device("cpu"))
    require_finite(name, matrix)
    linear, _ = round_to_nearest(matrix, treatment.scheme)
    remarks: dict[str, Any] = {
        "notes": [],
        "errors": {},
        "zeros": {},
        "bits": {name: treatment.scheme.bits},
        "kv_scales": None,
        "seconds": 0.0,
    }
    work.keep_layer(place, {name: linear}, {}, remarks)
