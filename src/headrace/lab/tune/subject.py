"""What is tuned: the model and machine that candidates depend on, and what a search's numbers depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__
from headrace.backend.cpu.cores import usable_cores
from headrace.errors import ConfigError
from headrace.lab.bench.context import context
from headrace.lab.bench.datasets import read_dataset
from headrace.lab.bench.session import Plan
from headrace.lab.bench.workload import read_prompts
from headrace.lab.evaluate.evaluation import Settings
from headrace.lab.evaluate.gate import Gate
from headrace.lab.tune.switches import Dimension, Subject
from headrace.lab.tune.trial import Setup
from headrace.model import store
from headrace.model.checkpoint import Checkpoint
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights import open_checkpoint

_EMBEDDINGS = ("embed.weight", "position_embed.weight", "head.weight")


def subject(model: str, options: Mapping[str, Any], plan: Plan) -> Subject:
    """What candidates may depend on. ``options``: the server's that are not fixed, with their defaults.

    Raises ConfigError for a model that generates nothing, and what opening it raises.
    """
    checkpoint = open_checkpoint(store.resolve(model))
    if checkpoint.architecture.encoder is not None:
        raise ConfigError(f"{model} embeds and generates nothing: tune is for models that generate")
    return Subject(
        options=options,
        cores=usable_cores(),
        float_weights=_has_float_weights(checkpoint),
        users=int(plan.levels[0]) if plan.kind == "closed" else None,
    )


def _has_float_weights(checkpoint: Checkpoint) -> bool:
    """Whether its first matrix is not quantised: files hold all but the embedding alike."""
    for name in checkpoint.names():
        if name.endswith(".weight") and "norm" not in name and name not in _EMBEDDINGS:
            return not isinstance(checkpoint.tensor(name), QuantTensor)
    return False


def about(setup: Setup, dimensions: Sequence[Dimension], gate: Gate, evaluated: Settings) -> dict[str, Any]:
    """All that decides what a search measures, by name: a folder goes on only with an equal one.

    Raises ConfigError for requests of the user's that cannot be read.
    """
    asked, plan, here = setup.asked, setup.plan, context()
    most = 1  # lengths of answers are no part of what is checked here
    if asked.prompts is not None:
        read_prompts(asked.prompts, most)
    elif asked.dataset is not None:
        read_dataset(asked.dataset, most)
    workload = msgspec.to_builtins(asked, enc_hook=str)
    if asked.prompts is not None:
        workload["prompts"] = f"{asked.prompts.name} {_digest(asked.prompts)}"
    return {
        "model": setup.model,
        "checkpoint": open_checkpoint(store.resolve(setup.model)).fingerprint(),
        "headrace": __version__,
        "machine": f"{here.cpu}, {here.cores} cores",
        "workload": {name: value for name, value in workload.items() if value is not None},
        "load": f"{plan.kind} {plan.levels[0]:g}" + (f" {plan.arrivals}" if plan.kind == "open" else ""),
        "window_s": plan.duration_s,
        "warmup_s": plan.warmup_s,
        "seed": plan.seed,
        "limits": {} if plan.slo is None else msgspec.to_builtins(plan.slo),
        "serve": " ".join(setup.fixed),
        "switches": {d.name: [choice.label for choice in d.choices] for d in dimensions},
        "gate": gate.model_dump(exclude_none=True),
        "gate_text": [*evaluated.texts, evaluated.tokens],
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
