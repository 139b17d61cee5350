"""headrace itself, through the same protocol as everyone else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from protocol import Generated, Loaded, Runner, Settings, log_softmax, run, size_bytes

if TYPE_CHECKING:
    from headrace.engine.request import EngineOutput

Narrowed = Literal["int8", "int4"]
NARROWED: dict[str, Narrowed] = {"int8": "int8", "int4": "int4"}
"""Formats that are made while loading, from the float checkpoint."""
GROUP_BYTES = {"int8": 34, "int4": 20}
"""Of 32 weights with their float16 scale, and minimum where there is one."""


class Headrace(Runner):
    """The embedded engine for offline workloads, ``headrace serve`` for the mixed load."""

    def load(self, model: Path, form: str, settings: Settings) -> Loaded:
        from headrace import LLM, CacheConfig, ModelConfig, SchedulerConfig, __version__

        self._model, self._form, self._settings = model, form, settings
        self._llm = LLM(
            model_config=ModelConfig(
                model=str(model),
                quantization=NARROWED.get(form),
                threads=settings.threads,
                max_model_len=settings.max_len,
            ),
            cache_config=CacheConfig(kv_cache_memory_bytes=self._kv_bytes()),
            scheduler_config=SchedulerConfig(max_num_seqs=settings.max_sequences),
        )
        isa = self._llm.frontend.client.capabilities.isa
        return Loaded(f"headrace {__version__} ({isa})", self._weights_bytes())

    def _kv_bytes(self) -> int:
        """Room for ``kv_tokens`` in bf16."""
        from headrace.model.weights import open_checkpoint

        layers = open_checkpoint(self._model).architecture.layers
        a_token = sum(2 * 2 * spec.attention.kv_heads * spec.attention.head_dim for spec in layers)
        return max(64 << 20, self._settings.kv_tokens * a_token)

    def _weights_bytes(self) -> int:
        """As stored; what is narrowed while loading counts as what it then is."""
        if self._form not in NARROWED:
            return size_bytes(self._model, ".safetensors")
        from headrace.model.weights import open_checkpoint
        from headrace.model.weights.tensor_shapes import expected_shapes

        total = 0
        for name, shape in expected_shapes(open_checkpoint(self._model).architecture).items():
            if len(shape) < 2:
                total += shape[0] * 2
            else:
                head = name in ("embed.weight", "head.weight")  # never below 8 bits
                total += shape[0] * shape[1] // 32 * GROUP_BYTES["int8" if head else self._form]
        return total

    def generate(self, prompts: list[list[int]], output_tokens: int) -> Generated:
        from headrace import SamplingParams
        from headrace.engine.request import EngineRequest

        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        found: list[list[int]] = [[] for _ in prompts]
        first: list[float] = []
        failed: list[str] = []
        ended = threading.Semaphore(0)

        def sink(outputs: list[EngineOutput]) -> None:
            if not first:
                first.append(time.perf_counter())
            for output in outputs:
                found[int(output.request_id)] += output.token_ids
                if output.error_message:
                    failed.append(output.error_message)
                if output.finish_reason is not None:
                    ended.release()

        client = self._llm.frontend.client
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params)
            client.submit(request, sink)
        for _ in prompts:
            ended.acquire()
        seconds = time.perf_counter() - began
        if failed:
            raise RuntimeError(failed[0])
        return Generated(seconds, first[0] - began, found)

    def logprobs(self, token_ids: list[int], rows: int) -> Any:
        import numpy as np

        from headrace.backend.batch import BLOCK_SIZE, Batch, SamplingTable
        from headrace.backend.cpu.runner import open_cpu_runner
        from headrace.backend.runner import RunnerSettings
        from headrace.model.weights import open_checkpoint

        count = len(token_ids)
        blocks = -(-count // BLOCK_SIZE)
        runner = open_cpu_runner(
            open_checkpoint(self._model, quantization=NARROWED.get(self._form)),
            RunnerSettings(
                num_blocks=blocks,
                max_batch_tokens=count,
                max_sequences=1,
                max_model_len=blocks * BLOCK_SIZE,
                max_logit_rows=rows,
                threads=self._settings.threads,
            ),
        )
        groups = len(runner.architecture.kv_groups)
        positions = np.arange(count, dtype=np.int32)
        batch = Batch(
            token_ids=np.asarray(token_ids, np.int32),
            positions=positions,
            query_start=np.asarray([0, count], np.int32),
            context_len=np.asarray([count], np.int32),
            slot_mapping=(positions,) * groups,
            block_tables=(np.arange(blocks, dtype=np.int32)[None],) * groups,
            logit_rows=positions[-rows:].copy(),
            sampling=SamplingTable.greedy(rows),
        )
        try:
            return log_softmax(runner.logits(batch))
        finally:
            runner.close()

    def serve(self, model: Path, form: str, settings: Settings, port: int) -> None:
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model), "--port", str(port)]
        command += ["--threads", str(settings.threads), "--max-num-seqs", str(settings.max_sequences)]
        command += ["--quantization", form] if form in NARROWED else []
        subprocess.Popen(command)


if __name__ == "__main__":
    run(Headrace())
