"""What a training that was ended early goes on from: safetensors and a JSON file in a folder of its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.errors import ConfigError, ModelFormatError
from headrace.lab.compress.formats.publish import published
from headrace.lab.compress.formats.shards import Shards
from headrace.model.weights.safetensors_file import SafetensorsFile

_PREFIX = "checkpoint-"
_PARTS = ("parameter", "first", "second", "best")


@dataclass(slots=True)
class Evaluated:
    """One look at the held-out data. ``loss``: the mean of the steps since the one before."""

    step: int
    seconds: float
    kl: float
    loss: float | None = None


@dataclass(slots=True)
class State:
    """Where a training stands. ``evaluated``: how many of the planned evaluations are done; ``tokens``: that
    the student has seen; ``losses``: sum and number of the steps' since the last evaluation."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    evaluated: int = 0
    losses: tuple[float, int] = (0.0, 0)
    history: list[Evaluated] = field(default_factory=list)
    stopped: str | None = None

    @property
    def best(self) -> Evaluated:
        """The evaluation with the smallest divergence, the first of equals."""
        return min(self.history, key=lambda one: one.kl)


Tensors = dict[str, torch.Tensor]


def save(
    folder: Path, state: State, optimizer: torch.optim.Optimizer, parameters: Tensors, best: Tensors | None
) -> None:
    """Keep everything in ``folder``, whole or not at all, and remove what was kept before.

    ``best``: the best parameters so far, None if they are the present ones. Raises OSError.
    """
    target = folder / f"{_PREFIX}{state.step:08}"
    _clean(folder)
    if target.exists():
        return
    older = _found(folder)
    with published(target) as draft:
        with Shards(draft, 4 * len(parameters)) as shards:
            for name, parameter in parameters.items():
                shards.add(f"parameter/{name}", parameter.detach().numpy())
                moments = optimizer.state.get(parameter, {})
                if moments:
                    shards.add(f"first/{name}", moments["exp_avg"].numpy())
                    shards.add(f"second/{name}", moments["exp_avg_sq"].numpy())
                if best is not None:
                    shards.add(f"best/{name}", best[name].numpy())
        (draft / "state.json").write_text(json.dumps(asdict(state)), "utf-8")
    for path in older:
        shutil.rmtree(path)


def restore(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Tensors
) -> tuple[State, Tensors] | None:
    """Put back what was kept; the state, and the best parameters. None if nothing was.

    Raises ConfigError for files that cannot be read.
    """
    _clean(folder)
    found = _found(folder)
    if not found:
        return None
    try:
        read = json.loads((found[-1] / "state.json").read_bytes())
        history = [Evaluated(**one) for one in read.pop("history")]
        read["losses"] = tuple(read["losses"])
        state = State(**read, history=history)
        tensors: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
        for path in sorted(found[-1].glob("*.safetensors")):
            file = SafetensorsFile(path)
            for key in file.entries:
                part, _, name = key.partition("/")
                tensors[part][name] = torch.from_numpy(np.array(file.read(key)))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors["parameter"][name])
                if state.step:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(float(state.step)),
                        "exp_avg": tensors["first"][name],
                        "exp_avg_sq": tensors["second"][name],
                    }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ModelFormatError):
        raise ConfigError(f"{found[-1]} is damaged: remove the folder {folder} to start afresh.") from None
    return state, tensors["best"] or tensors["parameter"]


def kept_step(folder: Path) -> int | None:
    """The step from which a training in ``folder`` would go on; None: from the beginning."""
    found = _found(folder)
    return int(found[-1].name.removeprefix(_PREFIX)) if found else None


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def _clean(folder: Path) -> None:
    """Remove drafts that a killed run has left."""
    for path in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
