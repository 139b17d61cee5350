"""OpenVINO GenAI's continuous batching pipeline, its KV and precision hints as it chooses them."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, call, log_softmax, run, size_bytes

EXPORT = {
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
    "int8": ["--weight-format", "int8"],
    "fp16": ["--weight-format", "fp16"],
}


class OpenVINO(Runner):
    """Formats are weight formats of its exporter; activations are bf16 where the CPU has them."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", str(source), "--task", "text-generation-with-past", *EXPORT[form]]
        call([*command, str(target)])

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        import openvino_genai

        self._model, self._settings = model, settings
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = settings.max_sequences
        config = json.loads((model / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        # In tokens as everywhere; a token's K and V are u8 with a scale and zero point for each head.
        a_token = config["num_hidden_layers"] * kv_heads * 2 * (width + 8)
        scheduler.num_kv_blocks = 0
        scheduler.cache_size = max(1, -(-settings.kv_tokens * a_token // 2**30))
        scheduler.enable_prefix_caching = True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings.threads}
        )
        return Loaded(f"openvino-genai {metadata.version('openvino-genai')}", size_bytes(model, "_model.bin"))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_tokens, ignore_eos=True, do_sample=False
        )
        first: float | None = None
        found: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        handles = [
            self._pipe.add_request(number, openvino.Tensor(np.asarray([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for tokens, handle in zip(found, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
            if first is None and any(found):
                first = time.perf_counter()
        seconds = time.perf_counter() - began
        return Generated(seconds, None if first is None else first - began, found)

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import numpy as np
        import openvino

        core = openvino.Core()
        path = self._model / "openvino_model.xml"
        compiled = core.compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": self._settings.threads})
        count = len(token_ids)
        inputs = {
            "input_ids": np.asarray([token_ids], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = {name for port in compiled.inputs for name in port.names}
        request = compiled.create_infer_request()
        request.infer({name: value for name, value in inputs.items() if name in names})
        return log_softmax(request.get_tensor("logits").data[0, -rows:])


if __name__ == "__main__":
    run(OpenVINO())
