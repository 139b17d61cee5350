"""The child's side: commands as JSON lines on standard input, one answer a line on standard output.

Standard library only: it is imported by every engine's own Python. Whatever an engine prints goes to standard
error, so that standard output carries answers only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Loaded:
    """``version``: of the engine and of what it stands on; ``weights_bytes``: as stored on disk."""

    version: str
    weights_bytes: int


@dataclass(slots=True)
class Generated:
    """``seconds`` from the call to the last token of all prompts, ``first_s`` to the first token of any."""

    seconds: float
    first_s: float | None
    token_ids: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """What every engine is given: threads, the longest context in tokens, sequences at once, KV tokens."""

    threads: int
    max_len: int
    max_sequences: int
    kv_tokens: int


class Runner:
    """One engine. What it does not implement, it says."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        """Make the model of this engine's ``form`` at ``target`` from the checkpoint ``source``."""
        raise NotImplementedError("has no formats of its own")

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        """Load ``model``, ready for :meth:`generate`."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        """Greedy, all prompts at once, exactly ``output_tokens`` each, whatever the end token says."""
        raise NotImplementedError

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        """Log-probabilities ``[rows, vocabulary]``, float32, after each of the last ``rows`` tokens."""
        raise NotImplementedError("does not tell logits")

    def serve(self, model: Path, form: str, settings: Settings, port: int) -> None:
        """Start an OpenAI-compatible server on 127.0.0.1; return once it was started, ready or not."""
        raise NotImplementedError("has no server")


def answer(runner: Runner, asked: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command. What goes wrong becomes ``{"error": one line}``."""
    try:
        do = asked["do"]
        if do == "prepare":
            runner.prepare(Path(asked["source"]), Path(asked["target"]), asked["format"])
            return {}
        if do == "load":
            return asdict(runner.load(Path(asked["model"]), asked["format"], Settings(**asked["settings"])))
        if do == "generate":
            return asdict(runner.generate(asked["prompts"], asked["output_tokens"]))
        if do == "logprobs":
            import numpy as np

            np.save(asked["path"], np.asarray(runner.logprobs(asked["token_ids"], asked["rows"]), np.float32))
            return {}
        if do == "serve":
            settings = Settings(**asked["settings"])
            runner.serve(Path(asked["model"]), asked["format"], settings, asked["port"])
            return {}
        return {"error": f"there is no command {do!r}"}
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {said[0][:300]}".removesuffix(": ")}


def run(runner: Runner) -> None:
    """Answer commands until standard input ends."""
    with os.fdopen(os.dup(1), "w") as wire:
        os.dup2(2, 1)
        for line in sys.stdin:
            wire.write(json.dumps(answer(runner, json.loads(line))) + "\n")
            wire.flush()
    os._exit(0)  # engines' own threads and exit handlers have been seen to hang


def call(command: list[str]) -> None:
    """Run a tool of the engine's. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise RuntimeError(said[-1].strip() if said else f"{command[0]} ended with {done.returncode}")


def size_bytes(path: Path, *suffixes: str) -> int:
    """Of a file, or of a folder's files whose names end in one of ``suffixes``."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.name.endswith(suffixes))


def log_softmax(logits: Any) -> Any:
    """Along the last axis, in float32."""
    import numpy as np

    shifted = np.asarray(logits, np.float32)
    shifted = shifted - shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
