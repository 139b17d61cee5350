"""Transformers on torch: the plain implementation, and in float32 the reference of all others."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, log_softmax, run, size_bytes


class Transformers(Runner):
    """``AutoModelForCausalLM.generate`` in bf16, or in float32."""

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32 if form == "float32" else torch.bfloat16
        ).eval()
        version = f"transformers {metadata.version('transformers')}, torch {metadata.version('torch')}"
        return Loaded(version, size_bytes(model, ".safetensors"))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        import torch

        first: list[float] = []

        def watch(*_: Any, **__: Any) -> Any:
            if not first:
                first.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        began = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                pad_token_id=0,
                stopping_criteria=[watch],
            )
        seconds = time.perf_counter() - began
        return Generated(seconds, first[0] - began, output[:, len(prompts[0]) :].tolist())

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, -rows:]
        return log_softmax(logits.float().numpy())


if __name__ == "__main__":
    run(Transformers())
