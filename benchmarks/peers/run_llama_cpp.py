"""llama.cpp, as its package xllamacpp brings it: the native server's engine, asked on the loopback."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from protocol import Generated, Loaded, Runner, Settings, run, size_bytes


class LlamaCpp(Runner):
    """Formats: the GGUF as shipped, and its matrices requantised to Q4_0 or Q8_0."""

    def prepare(self, source: Path, target: Path, form: str) -> None:
        """Requantise a GGUF file's dequantised matrices, or a Transformers folder's.

        The embedding, which is the head as well, becomes Q8_0.
        """
        import gguf
        import gguf_folder
        import numpy as np

        writer = gguf.GGUFWriter(target, "llama")
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
        if source.is_dir():
            gguf_folder.write_metadata(source, writer)
            tensors = gguf_folder.tensors(source)
        else:
            reader = gguf.GGUFReader(source)
            _copy_metadata(reader, writer)
            tensors = ((one.name, gguf.dequantize(one.data, one.tensor_type)) for one in reader.tensors)
        for name, values in tensors:
            if values.ndim < 2:
                writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
                continue
            kind = gguf.GGMLQuantizationType["Q8_0" if name.startswith("token_embd") else form]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        self._start(model, settings, port=0)
        return Loaded(f"xllamacpp {metadata.version('xllamacpp')}", size_bytes(model))

    def serve(self, model: Path, form: str, settings: Settings, port: int) -> None:
        self._start(model, settings, port)

    def _start(self, model: Path, settings: Settings, port: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = settings.kv_tokens
        params.n_parallel = settings.max_sequences
        params.kv_unified = True  # slots share one context, as sequences share blocks elsewhere
        params.cpuparams.n_threads = settings.threads
        params.cpuparams_batch.n_threads = settings.threads
        params.n_gpu_layers = 0
        params.cache_ram_mib = 0
        if port:
            params.port = port
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(settings.max_sequences)

    def _ask(self, prompt: list[int], output_tokens: int, probabilities: int = 0) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens": True,
            "n_probs": probabilities,
        }
        address = f"{self._server.listening_address}/completion"
        request = urllib.request.Request(
            address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        began = time.perf_counter()
        answers = list(self._pool.map(lambda prompt: self._ask(prompt, output_tokens), prompts))
        seconds = time.perf_counter() - began
        # Not streamed: the first token's time is the engine's own account of its prompt.
        first_s = answers[0]["timings"]["prompt_ms"] / 1e3 if len(prompts) == 1 else None
        return Generated(seconds, first_s, [answer["tokens"] for answer in answers])

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import numpy as np

        found = []
        for end in range(len(token_ids) - rows + 1, len(token_ids) + 1):
            listed = self._ask(token_ids[:end], 1, probabilities=10**6)["completion_probabilities"][0]
            row = np.full(len(listed["top_logprobs"]), -np.inf, np.float32)
            for one in listed["top_logprobs"]:
                row[one["id"]] = one["logprob"]
            found.append(np.maximum(row, -80.0))  # tokens whose probability is 0 in float32
        return np.stack(found)


def _copy_metadata(reader: Any, writer: Any) -> None:
    import gguf

    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)


if __name__ == "__main__":
    run(LlamaCpp())
