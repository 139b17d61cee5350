"""A batch of prompts through headrace, from settings to statistics.

Run it with ``python examples/seed.py [model]``; the default model is fetched on first use.
"""

from __future__ import annotations

import sys
import time

from headrace import LLM, CacheConfig, ModelConfig, SamplingParams

# Every prompt begins with these lines: with prefix caching they are computed once, not once per prompt.
BRIEFING = (
    "You write for the notice board of a small water mill. The mill stands on the river Ouse, grinds wheat "
    "and rye on two pairs of stones, and is open to visitors on Saturdays. Its wheel is fed by a headrace "
    "half a mile long. Notes on the board are short, friendly and exact.\n\n"
)
NOTES = (
    "A note on why the wheel stands still in August:",
    "A note that tells visitors where to leave their bicycles:",
    "A note about the difference between wheat and rye flour:",
    "A note that thanks the volunteers who cleared the headrace:",
    "A note on what a headrace is, for children:",
    "A note that announces new opening hours:",
)


def main() -> None:
    """Generate, print the texts, then what the engine says about itself."""
    model_config = ModelConfig(
        model=sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m",
        quantization=None,  # "int8" or "int4" narrow a float checkpoint; this one is quantised already
        max_model_len=2048,
    )
    # swap_space: GiB for blocks that the pool has to give up; kv_tier_path would keep them for the next time.
    cache_config = CacheConfig(block_size=16, swap_space=1)
    sampling_params = SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=64, repetition_penalty=1.1, seed=1
    )

    with LLM(model_config=model_config, cache_config=cache_config, enable_prefix_caching=True) as llm:
        llm.generate(BRIEFING, SamplingParams(max_tokens=1))  # puts the shared prefix into the cache
        began = time.perf_counter()
        answers = llm.generate([BRIEFING + note for note in NOTES], sampling_params)
        seconds = time.perf_counter() - began

        for note, answer in zip(NOTES, answers, strict=True):
            print(f"{note}\n    {answer.outputs[0].text.strip()}\n")
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        stats = llm.stats()
        print(f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s)")
        print(f"prefix cache hit rate: {stats.prefix_cache_hit_rate:.1%}")
        print(f"running sequences:     {stats.num_running_seqs}")


if __name__ == "__main__":
    main()
