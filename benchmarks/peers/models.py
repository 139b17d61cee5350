"""The model in every engine's format: found, or made and kept."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from catalogue import Source, Variant
from child import Child, ChildError
from environments import Unavailable, child_environment, clear, converted, home, making, python_of
from float_checkpoint import LLAMA_1B, write_dequantised, write_random

from headrace.model.weights import open_checkpoint

HERE = Path(__file__).parent
PREPARE_TIMEOUT_S = 1800.0


def start(variant: Variant, threads: int, log: Path) -> Child:
    """The process of an engine, ready to be asked. Raises Unavailable."""
    command = [str(python_of(variant.peer)), str(HERE / variant.peer.script)]
    return Child(command, child_environment(variant.peer, threads), log)


class Models:
    """One model (``shipped``) in all formats; ``name`` is that of the folder that keeps them."""

    def __init__(self, shipped: Path, logs: Path, threads: int) -> None:
        digest = hashlib.sha256(open_checkpoint(shipped).fingerprint().encode()).hexdigest()[:8]
        self.name = f"{shipped.stem}-{digest}"
        self.shipped = shipped
        self._logs, self._threads = logs, threads

    def of(self, variant: Variant) -> Path:
        """The path of the model for an engine. Raises Unavailable."""
        source = self._source(variant.form.source)
        if not variant.form.made:
            return source
        target = converted(variant.peer, variant.form, self.name)
        with making():
            if not target.exists():
                self._convert(variant, source, target)
        return target

    def _source(self, kind: Source) -> Path:
        if kind == "shipped":
            return self.shipped
        target = home() / "models" / self.name / kind
        with making():
            if not target.exists():
                draft = target.with_name(f"{kind}.draft")
                clear(draft)
                write_dequantised(self.shipped, draft, kind)
                draft.rename(target)
        return target

    def _convert(self, variant: Variant, source: Path, target: Path) -> None:
        print(f"converting for {variant.name}", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"draft-{target.name}")
        clear(draft)
        log = self._logs / f"{variant.name.replace(':', '-')}-prepare.log"
        child = start(variant, self._threads, log)
        try:
            child.ask(
                PREPARE_TIMEOUT_S,
                do="prepare",
                source=str(source),
                target=str(draft),
                format=variant.form.name,
            )
        except ChildError as error:
            clear(draft)
            raise Unavailable(f"not converted: {error}") from None
        finally:
            child.close()
        draft.rename(target)


class LargeModels(Models):
    """Random weights of the 1B shape: every format is made from one bf16 folder."""

    def __init__(self, tokenizer_of: Path, logs: Path, threads: int) -> None:
        folder = home() / "models" / "random-1b" / "bfloat16"
        with making():
            if not folder.exists():
                print("writing random weights of the 1B shape", file=sys.stderr, flush=True)
                draft = folder.with_name("bfloat16.draft")
                clear(draft)
                write_random(draft, LLAMA_1B, tokenizer_of)
                draft.rename(folder)
        super().__init__(folder, logs, threads)
        self.name = "random-1b"

    def _source(self, kind: Source) -> Path:
        return self.shipped
