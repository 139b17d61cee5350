"""ONNX Runtime GenAI: static batches of equally long prompts."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, call, log_softmax, run, size_bytes


class OnnxRuntime(Runner):
    """int4 by its own model builder, products in int8 (accuracy level 4)."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(source),
            "-o",
            str(target),
        ]
        command += ["-p", form, "-e", "cpu", "-c", str(target.with_suffix(".cache"))]
        command += ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
        call(command)

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(model))
        options = {"session_options": {"intra_op_num_threads": settings.threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = onnxruntime_genai.Model(config)
        version = f"onnxruntime-genai {metadata.version('onnxruntime-genai')}"
        return Loaded(version, size_bytes(model, ".onnx", ".onnx.data"))

    def _generator(self, prompts: list[list[int]], output_tokens: int) -> Any:
        import numpy as np
        import onnxruntime_genai

        params = onnxruntime_genai.GeneratorParams(self._model)
        length = len(prompts[0]) + output_tokens
        # The shortest length keeps the end token from being chosen before it.
        params.set_search_options(
            do_sample=False, min_length=length, max_length=length, batch_size=len(prompts)
        )
        generator = onnxruntime_genai.Generator(self._model, params)
        generator.append_tokens(np.asarray(prompts, np.int32))
        return generator

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        first: float | None = None
        began = time.perf_counter()
        generator = self._generator(prompts, output_tokens)
        for _ in range(output_tokens):
            generator.generate_next_token()
            if first is None:
                first = time.perf_counter()
        seconds = time.perf_counter() - began
        found = [generator.get_sequence(row)[len(prompt) :].tolist() for row, prompt in enumerate(prompts)]
        return Generated(seconds, None if first is None else first - began, found)

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import numpy as np

        first = len(token_ids) - rows + 1
        generator = self._generator([token_ids[:first]], rows)
        found = [np.array(generator.get_logits()).reshape(-1)]
        for token in token_ids[first:]:
            generator.append_tokens(np.asarray([[token]], np.int32))
            found.append(np.array(generator.get_logits()).reshape(-1))
        return log_softmax(np.stack(found))


if __name__ == "__main__":
    run(OnnxRuntime())
