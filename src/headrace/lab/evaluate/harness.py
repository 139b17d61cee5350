"""lm-evaluation-harness on our engine: its tasks, prompts and metrics, our models and statistics.

Importing this module registers the model ``headrace`` with lm-eval 0.4, for programs that drive lm-eval
themselves: ``model="headrace", model_args={"model": "smollm2-135m"}``. It needs lm-eval to be installed.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from headrace.errors import ConfigError, HeadraceError
from headrace.frontend.llm import SamplingParams
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.evaluate.answers import LocalAnswerer
from headrace.lab.evaluate.choices import encode_pair
from headrace.lab.evaluate.models import Candidate, Models
from headrace.lab.evaluate.results import Item, ItemsResult, items_result
from headrace.lab.evaluate.statistics import Estimate

CONTEXT = 4096
"""Tokens of context and continuation, or as many as the model takes; what is longer loses its beginning."""
_DEFAULT_TOKENS = 256
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class CandidateLM(LM):
    """One of ``models`` as lm-eval wants it; loaded for scoring or for writing as requests come."""

    def __init__(self, models: Models, candidate: Candidate) -> None:
        super().__init__()
        self._models = models
        self._candidate = candidate

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint: lm-eval's caches of requests depend on it."""
        return self._tokenizer.fingerprint

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Of each (context, continuation) the continuation's log-probability and whether it is greedy."""
        scorer = self._models.scorer(self._candidate, CONTEXT)
        pairs = [self._pair(*request.args, max_tokens=scorer.max_tokens) for request in requests]
        found: list[tuple[float, bool]] = []
        for context, same in itertools.groupby(pairs, key=lambda pair: pair[0]):
            scored = scorer.greedy_continuations(context, [continuation for _, continuation in same])
            found += [(float(scores.sum()), greedy) for scores, greedy in scored]
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of each text the log-probability of all its tokens, the first after BOS (or EOS)."""
        scorer = self._models.scorer(self._candidate, CONTEXT)
        totals = []
        for request in requests:
            token_ids = self._tokenizer.encode(request.args[0], add_special_tokens=False)
            total = 0.0
            for inputs, wanted in get_rolling_token_windows(
                token_ids, self._first_token(), scorer.max_tokens - 1, 1
            ):
                window, at = [*inputs, wanted[-1]], len(inputs) + 1 - len(wanted)
                for rows in scorer.log_probs(window, at):
                    total += float(sum(row[token] for row, token in zip(rows, window[at:], strict=False)))
                    at += len(rows)
            totals.append(total)
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What the model writes after each context, up to a stop string or the limit of tokens."""
        answerer = self._models.answerer(self._candidate)
        assert isinstance(answerer, LocalAnswerer)
        prompts, params = [], []
        for request in requests:
            context, settings = request.args
            its = sampling(settings)
            token_ids = self._tokenizer.encode(context) or [self._first_token()]
            room = (answerer.context_length or CONTEXT) - (its.max_tokens or 0)
            prompts.append(token_ids[-max(room, 1) :])
            params.append(its)
        return answerer.complete(prompts, params)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._candidate.tokenizer()

    def _first_token(self) -> int:
        tokenizer = self._tokenizer
        if tokenizer.bos_token_id is not None:
            return tokenizer.bos_token_id
        return min(tokenizer.eos_token_ids, default=0)

    def _pair(self, context: str, continuation: str, *, max_tokens: int) -> tuple[list[int], list[int]]:
        if context:
            return encode_pair(context, continuation, self._tokenizer, max_tokens)
        token_ids = self._tokenizer.encode(continuation, add_special_tokens=False)
        return [self._first_token()], token_ids[: max_tokens - 1]


@register_model("headrace")
class HeadraceLM(CandidateLM):
    """A model by its reference. lm-eval's batch sizes are taken and not used: the engine makes its own.

    Raises what finding the model raises; its weights are loaded with the first request.
    """

    def __init__(
        self,
        model: str,
        *,
        quantization: Literal["int8", "int4"] | None = None,
        backend: Literal["cpu", "torch"] = "cpu",
        device: str = "cpu",
        threads: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        models = Models(
            model,
            None,
            quantization=quantization,
            backend=backend,
            device=device,
            threads=threads,
            endpoint=None,
            tokenizer=None,
            downloads=None,
        )
        super().__init__(models, models.model)


def sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """A task's ``generation_kwargs``. Raises ConfigError for those that mean nothing here."""
    rest = dict(settings)
    until = rest.pop("until", None) or []
    limits = [rest.pop(name) for name in _TOKEN_LIMITS if rest.get(name) is not None]
    samples = rest.pop("do_sample", None)
    temperature = float(rest.pop("temperature", None) or 0.0)
    known = {name: rest.pop(name) for name in ("top_p", "top_k", "min_p") if rest.get(name) is not None}
    if left := [name for name, value in rest.items() if value is not None]:
        raise ConfigError(
            f"The task's generation_kwargs hold {', '.join(left)}, which headrace does not know."
        )
    return SamplingParams(
        temperature=0.0 if samples is False else temperature,
        max_tokens=int(limits[0]) if limits else _DEFAULT_TOKENS,
        stop=[until] if isinstance(until, str) else [text for text in until if text],
        **(known if temperature and samples is not False else {}),
    )


def run_task(task: str, models: Models, *, include: Path | None, limit: int | None, seed: int) -> ItemsResult:
    """A task (or group of tasks) of lm-eval on the model and its reference, if there is one.

    ``include``: a folder with tasks of the user's own. Raises ConfigError for a task that does not exist or
    that lm-eval cannot run (it says why), and what loading and running models raises.
    """
    logging.getLogger("lm-eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include is None else str(include))
    if task not in manager.all_tasks:
        raise ConfigError(f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists them.")
    candidates = [models.model] + ([] if models.reference is None else [models.reference])
    found = [_evaluate(task, CandidateLM(models, one), manager, limit, seed) for one in candidates]
    (items, whole), *rest = found
    result = items_result("harness", items, rest[0][0] if rest else None, seed=seed)
    result.metrics |= whole
    result.not_judged = []
    if whole and rest:
        result.notes.append(f"{', '.join(whole)}: of the suite as a whole, not compared item by item.")
    return result


def _evaluate(
    task: str, model: CandidateLM, manager: TaskManager, limit: int | None, seed: int
) -> tuple[list[Item], dict[str, Estimate]]:
    """Items with the metrics that are means over items, and the other metrics as lm-eval gives them."""
    try:
        found: Any = lm_eval.simple_evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=100,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except HeadraceError:
        raise
    except Exception as error:  # whatever a task's own code and data raise
        said = str(error).strip().splitlines()
        raise ConfigError(
            f"lm-eval could not run {task}: {type(error).__name__}: {said[0] if said else ''}"
        ) from None
    items: list[Item] = []
    whole: dict[str, Estimate] = {}
    for leaf, samples in found["samples"].items():
        reported = found["results"][leaf]
        by_document: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            by_document.setdefault(sample["doc_id"], []).append(sample)
        means = _means(samples, reported)
        items += [_item(f"{leaf}/{number}", same, means) for number, same in sorted(by_document.items())]
        if len(found["samples"]) == 1:
            whole |= _whole(reported, means, len(by_document))
    common = set.intersection(*(set(item.scores) for item in items)) if items else set()
    for item in items:
        item.scores = {name: value for name, value in item.scores.items() if name in common}
    return items, whole


def _named(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric} ({filtered})"


def _means(samples: Sequence[dict[str, Any]], reported: Mapping[str, Any]) -> set[str]:
    """The metrics that lm-eval reports as the mean of its samples' values."""
    values: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), []).append(sample[metric])
    return {
        _named(metric, filtered)
        for (metric, filtered), found in values.items()
        if all(isinstance(value, int | float) for value in found)
        and math.isclose(
            sum(found) / len(found), reported.get(f"{metric},{filtered}", math.nan), abs_tol=1e-9
        )
    }


def _item(identity: str, samples: Sequence[dict[str, Any]], means: set[str]) -> Item:
    scores = {
        name: float(sample[metric])
        for sample in samples
        for metric in sample["metrics"]
        if (name := _named(metric, sample["filter"])) in means
    }
    said = samples[0]["resps"][0][0] if samples[0]["resps"] and samples[0]["resps"][0] else None
    return Item(id=identity, scores=scores, answer=said if isinstance(said, str) else None)


def _whole(reported: Mapping[str, Any], means: set[str], count: int) -> dict[str, Estimate]:
    found = {}
    for key, value in reported.items():
        metric, _, filtered = key.partition(",")
        name = _named(metric, filtered)
        if not filtered or metric.endswith("_stderr") or name in means or not isinstance(value, int | float):
            continue
        se = reported.get(f"{metric}_stderr,{filtered}")
        found[name] = Estimate(
            value=float(value), se=float(se) if isinstance(se, int | float) else None, n=count
        )
    return found
