"""CTranslate2: static batches of equal prompts."""

from __future__ import annotations

import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, log_softmax, run, size_bytes


class CTranslate2(Runner):
    """``ctranslate2.Generator``; formats are its compute types."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(source)).convert(str(target), quantization=form)

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        import ctranslate2

        self._engine = ctranslate2.Generator(
            str(model), device="cpu", compute_type=form, intra_threads=settings.threads, inter_threads=1
        )
        self._names: list[str] = json.loads((model / "vocabulary.json").read_text())
        version = f"ctranslate2 {metadata.version('ctranslate2')} ({self._engine.compute_type})"
        return Loaded(version, size_bytes(model, ".bin"))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        first: list[float] = []

        def watch(_: Any) -> bool:
            if not first:
                first.append(time.perf_counter())
            return False

        began = time.perf_counter()
        results = self._engine.generate_batch(
            [[self._names[token] for token in prompt] for prompt in prompts],
            max_length=output_tokens,
            min_length=output_tokens,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=watch,
        )
        seconds = time.perf_counter() - began
        return Generated(seconds, first[0] - began, [result.sequences_ids[0] for result in results])

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import ctranslate2
        import numpy as np

        logits = self._engine.forward_batch([token_ids])
        if logits.dtype != ctranslate2.DataType.float32:
            logits = logits.to(ctranslate2.DataType.float32)
        return log_softmax(np.asarray(logits)[0, -rows:])


if __name__ == "__main__":
    run(CTranslate2())
