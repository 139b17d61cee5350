"""Arguments of vLLM's LLM that change nothing here, and what to do instead of those that would."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import ConfigError

_ANY = object()  # whatever is given makes no difference

# name: (values that change nothing here, what is right instead of others)
_KNOWN: dict[str, tuple[tuple[Any, ...] | object, str]] = {
    "tensor_parallel_size": ((1,), "one process computes a model; leave it at 1"),
    "pipeline_parallel_size": ((1,), "one process computes a model; leave it at 1"),
    "data_parallel_size": ((1,), "run one LLM a process; leave it at 1"),
    "distributed_executor_backend": (("uni",), "one process computes a model; leave it out"),
    "dtype": (("auto",), "weights keep their own format; quantization='int8' or 'int4' narrows them"),
    "load_format": (("auto", "safetensors", "gguf"), "safetensors and GGUF are read; leave it at 'auto'"),
    "tokenizer": ((), "the tokenizer comes with the model; leave it out"),
    "tokenizer_mode": (("auto", "hf"), "there is one kind of tokenizer; leave it at 'auto'"),
    "tokenizer_revision": ((), "the tokenizer comes with the model; leave it out"),
    "revision": ((), "write it into the model's name: hf:org/name@revision"),
    "hf_token": ((), "set HF_TOKEN in the environment"),
    "download_dir": ((), "set HEADRACE_CACHE (or HF_HOME) in the environment"),
    "skip_tokenizer_init": ((False,), "prompts may be token ids; leave it at False"),
    "enable_chunked_prefill": ((True,), "prefill is always chunked; max_num_batched_tokens bounds a step"),
    "enable_lora": ((False,), "adapters are not supported"),
    "cpu_offload_gb": ((0,), "weights stay where the backend computes; leave it at 0"),
    "trust_remote_code": (_ANY, ""),  # a model's code is never run, so allowing it changes nothing
    "enforce_eager": (_ANY, ""),
    "disable_log_stats": (_ANY, ""),
    "disable_custom_all_reduce": (_ANY, ""),
    "max_seq_len_to_capture": (_ANY, ""),
}
_NO_EFFECT = {
    "gpu_memory_utilization": "kv_cache_memory_bytes (default 512 MiB) bounds the KV cache",
    "num_gpu_blocks_override": "kv_cache_memory_bytes (default 512 MiB) bounds the KV cache",
}


def check_vllm_arguments(given: Mapping[str, Any], own: Iterable[str]) -> None:
    """Accept what changes nothing here; warn of what has no effect.

    ``own``: the names that do exist here. Raises ConfigError for a value that would matter and for a name
    that nobody knows, each with what would be right.
    """
    for name, value in given.items():
        if name in _NO_EFFECT:
            if value is not None:
                warnings.warn(f"{name} has no effect: {_NO_EFFECT[name]}", stacklevel=3)
            continue
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, [*own, *_KNOWN, *_NO_EFFECT], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(own))}."
            raise ConfigError(f"LLM has no argument {name!r}; {hint}", param=name)
        allowed, instead = _KNOWN[name]
        if value is not None and isinstance(allowed, tuple) and value not in allowed:
            raise ConfigError(f"{name}={value!r} is not supported: {instead}.", param=name)
