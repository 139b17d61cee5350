"""How fast each checkpoint format is served beside the native format of the same width.

    python benchmarks/format_speed.py [MODEL] [--rounds 7] [--threads N] [--keep FOLDER] [--only WORD,WORD]

MODEL is written in every format by ``headrace compress convert`` (groups of 128, or the largest that fits);
the native ones narrow its floats while loading. All, or those with one of the words in their names, are open
at once, embedding and head in int8 (``--quantization int8``) but in native bf16, and take turns, so that the
machine's moods hit all alike. decode: one stream of 128 tokens behind 64; batch: 16 such streams; prefill: a
prompt of 1024. Medians of the rounds' rates, and of their ratios to the native format in the same round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from headrace.lab.compress.convert import Rounding, Target, convert

PROMPT, OUTPUT, PREFILL, BATCH = 64, 128, 1024, 16
NATIVE = {"int4": "int4", "int8": "int8", "bf16": None}
FORMATS: tuple[tuple[str, Target, Rounding | None, str], ...] = (
    ("compressed-tensors int4", "compressed-tensors", "int4", "int4"),
    ("gptq int4", "gptq", "int4", "int4"),
    ("gptq-v2 int4, zero points", "gptq-v2", "int4", "int4"),
    ("awq int4, zero points", "awq", None, "int4"),
    ("gguf q4_0", "gguf-q4_0", None, "int4"),
    ("gguf q4_1", "gguf-q4_1", None, "int4"),
    ("compressed-tensors int8", "compressed-tensors", "int8", "int8"),
    ("compressed-tensors w8a8", "compressed-tensors", "w8a8", "int8"),
    ("gptq int8", "gptq", "int8", "int8"),
    ("gguf q8_0", "gguf-q8_0", None, "int8"),
    ("compressed-tensors fp8", "compressed-tensors", "fp8", "bf16"),
)
"""Its name, what is written, how it is rounded, and the native format of the same width. Float8 stands beside
bf16: it is widened, because no path of the CPU multiplies it."""


@dataclass
class Subject:
    """A model that is open, and its rates by workload, one a round."""

    name: str
    native: str
    llm: LLM
    rates: dict[str, list[float]]


def opened(path: Path | str, quantization: Any, threads: int) -> LLM:
    return LLM(
        model_config=ModelConfig(
            model=str(path), threads=threads, max_model_len=2048, quantization=quantization
        ),
        cache_config=CacheConfig(enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(max_num_seqs=BATCH),
    )


def seconds(llm: LLM, rng: random.Random, count: int, prompt: int, output: int) -> float:
    """To generate ``output`` tokens for each of ``count`` random prompts."""
    vocab = llm.frontend.client.architecture.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(prompt)]} for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def measure(subject: Subject, rng: random.Random) -> None:
    """One round."""
    llm = subject.llm
    first = seconds(llm, rng, 1, PROMPT, 1)
    found = {
        "decode": (OUTPUT - 1) / (seconds(llm, rng, 1, PROMPT, OUTPUT) - first),
        "batch": BATCH * OUTPUT / seconds(llm, rng, BATCH, PROMPT, OUTPUT),
        "prefill": PREFILL / seconds(llm, rng, 1, PREFILL, 1),
    }
    for workload, rate in found.items():
        subject.rates.setdefault(workload, []).append(rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="Folder for the written models, found again next time.")
    parser.add_argument("--only", default="", help="Words, split by commas: formats with one in their names.")
    arguments = parser.parse_args()
    wanted = [one for one in FORMATS if any(word in one[0] for word in arguments.only.split(","))]
    if not wanted:
        parser.error(f"--only {arguments.only}: the formats are {'; '.join(name for name, *_ in FORMATS)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = arguments.keep or Path(temporary)
        floats = folder / "bf16"
        if not floats.is_dir():
            convert(arguments.model, "bf16", floats)
        subjects = [
            Subject(f"native {name}", name, opened(floats, narrowed, arguments.threads), {})
            for name, narrowed in NATIVE.items()
            if any(name == native for *_, native in wanted)
        ]
        for name, target, rounding, native in wanted:
            path = folder / name.replace(" ", "-").replace(",", "")
            if not path.is_dir():
                convert(str(floats), target, path, rounding=rounding)
            subjects.append(Subject(name, native, opened(path, "int8", arguments.threads), {}))
        rng = random.Random(0)
        for number in range(arguments.rounds + 1):
            for subject in subjects:
                measure(subject, rng)
                if number == 0:
                    subject.rates.clear()  # the first round warms up
    show(subjects)


def show(subjects: list[Subject]) -> None:
    """Print the table."""
    capabilities = subjects[0].llm.frontend.client.capabilities
    print(f"{capabilities.isa}, {capabilities.threads} threads; tokens/s (ratio to native)")
    workloads = list(subjects[0].rates)
    print(f"{'':28s}{'beside':8s}" + "".join(f"{workload:>18s}" for workload in workloads))
    native = {subject.native: subject for subject in subjects if subject.name.startswith("native ")}
    for subject in subjects:
        cells = ""
        for workload in workloads:
            own, other = subject.rates[workload], native[subject.native].rates[workload]
            ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
            cells += f"{statistics.median(own):10.1f} ({ratio:.2f})".rjust(18)
        print(f"{subject.name:28s}{subject.native:8s}{cells}")


if __name__ == "__main__":
    main()
