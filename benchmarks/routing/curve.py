"""What a route costs and how good its answers are, over the confidence that it asks for.

Run it in a clone with the dev extra: ``python benchmarks/routing/curve.py``. Two tables:

1. On the held-out examples, by their labels: which share goes to the large model, which share gets the small
   one although its intent wants the large one (underserved), and the other way round (overserved).
2. With real models, on questions whose answers can be checked: answers right and cost of a thousand requests,
   beside the small model alone, the large one alone, and a coin that sends the same share to the large one.

SmolLM2 135M is the small model and Gemma 3 270M the large one. A base model of twice the size is not really
better, so the second table shows that the mechanism works, and nothing about what routing gains elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from headrace import LLM, SamplingParams
from headrace.gateway.config import Price
from headrace.gateway.intents.classifier import Judgement, read_classifier
from headrace.gateway.intents.examples import read_examples, shipped
from headrace.gateway.intents.features import embedded
from headrace.gateway.intents.policy import Policy
from headrace.gateway.intents.settings import WANTED, Candidate, Route
from headrace.gateway.usage import Usage, cost

SMALL, LARGE = "smollm2-135m", "gemma3-270m"
PRICES = {SMALL: Price(input=0.02, output=0.05), LARGE: Price(input=0.04, output=0.10)}
THRESHOLDS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
MAX_TOKENS = 48


@dataclass(frozen=True)
class Answered:
    """What a model made of a question: whether that was right, and its cost in 1e-9 dollars."""

    right: bool
    nano_usd: int


@dataclass(frozen=True)
class LabelPoint:
    """Shares of the held-out examples at one threshold."""

    threshold: float
    large: float
    underserved: float
    overserved: float


@dataclass(frozen=True)
class AnswerPoint:
    """Of the questions at one threshold; ``coin``: right answers if the same share went there by chance."""

    threshold: float
    large: float
    right: float
    coin: float
    usd_per_thousand: float


def judge(texts: Sequence[str]) -> list[Judgement]:
    """What the shipped classifier takes each text for."""
    classifier = read_classifier()
    with LLM(classifier.embedder) as llm:
        found = llm.embed([embedded(text) for text in texts], use_tqdm=False, truncate_prompt_tokens=-1)
    vectors = [np.array(output.outputs.embedding, dtype=np.float32) for output in found]
    return [classifier.judge(text, vector) for text, vector in zip(texts, vectors, strict=True)]


def policy(threshold: float) -> Policy:
    """Small and large, with a route's defaults but for the threshold."""
    candidates = {SMALL: Candidate(quality=0.5), LARGE: Candidate(quality=0.9)}
    settings = Route(candidates=candidates, min_confidence=threshold)
    return Policy("auto", settings, read_classifier())


def chosen(threshold: float, judgements: Sequence[Judgement]) -> list[str]:
    """The model that each request gets."""
    most = Usage(100, MAX_TOKENS)
    costs = {name: cost(price, most) for name, price in PRICES.items()}
    route = policy(threshold)
    return [route.choose([SMALL, LARGE], judgement, costs)[0] for judgement in judgements]


def by_labels() -> list[LabelPoint]:
    """The first table."""
    examples = read_examples(shipped("held-out.jsonl"))
    judgements = judge([example.text for example in examples])
    wants_large = np.array([WANTED[example.intent] > 0.5 for example in examples])
    points = []
    for threshold in THRESHOLDS:
        large = np.array([model == LARGE for model in chosen(threshold, judgements)])
        points.append(
            LabelPoint(
                threshold,
                float(large.mean()),
                float((wants_large & ~large).mean()),
                float((~wants_large & large).mean()),
            )
        )
    return points


def answer_all(model: str, prompts: Sequence[str], patterns: Sequence[str]) -> list[Answered]:
    """Ask a model everything, greedily. A base model is asked in the form of a questionnaire."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(model) as llm:
        if model == SMALL:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(chats, params, use_tqdm=False)
        else:
            asked = [
                f"Question: What colour is snow?\nAnswer: White.\n\nQuestion: {p}\nAnswer:" for p in prompts
            ]
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop=["\n\nQuestion:"])
            outputs = llm.generate(asked, params, use_tqdm=False)
    out = []
    for output, pattern in zip(outputs, patterns, strict=True):
        [choice] = output.outputs
        used = Usage(len(output.prompt_token_ids), len(choice.token_ids))
        right = re.search(pattern, choice.text.strip(), re.IGNORECASE) is not None
        out.append(Answered(right, cost(PRICES[model], used)))
    return out


def by_answers() -> list[AnswerPoint]:
    """The second table."""
    questions = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text("utf-8"))
    pairs = [pair for group in questions.values() for pair in group]
    prompts, patterns = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    judgements = judge(prompts)
    answers = {model: answer_all(model, prompts, patterns) for model in (SMALL, LARGE)}
    right = {model: np.mean([one.right for one in found]) for model, found in answers.items()}
    points = []
    for threshold in THRESHOLDS:
        models = chosen(threshold, judgements)
        got = [answers[model][at] for at, model in enumerate(models)]
        share = float(np.mean([model == LARGE for model in models]))
        points.append(
            AnswerPoint(
                threshold,
                share,
                float(np.mean([one.right for one in got])),
                float(share * right[LARGE] + (1 - share) * right[SMALL]),
                float(np.mean([one.nano_usd for one in got]) * 1000 / 1e9),
            )
        )
    for model, threshold in ((SMALL, -1.0), (LARGE, 2.0)):
        spent = float(np.mean([one.nano_usd for one in answers[model]]) * 1000 / 1e9)
        points.append(
            AnswerPoint(threshold, float(model == LARGE), float(right[model]), float(right[model]), spent)
        )
    return points


def draw(points: Sequence[AnswerPoint], path: Path) -> None:
    """Cost against right answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes: Any = figure.subplots()
    curve = [point for point in points if 0 <= point.threshold <= 1]
    axes.plot([p.usd_per_thousand for p in curve], [p.right for p in curve], "o-", label="route")
    axes.plot(
        [p.usd_per_thousand for p in curve], [p.coin for p in curve], "--", label="the same share by chance"
    )
    for point, name in zip(points[-2:], (f"{SMALL} only", f"{LARGE} only"), strict=True):
        axes.plot(point.usd_per_thousand, point.right, "s", label=name)
    axes.set(xlabel="dollars for a thousand requests", ylabel="answers right")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the second table: .png or .svg")
    options = parser.parse_args()
    labels, answers = by_labels(), by_answers()
    if options.picture is not None:
        draw(answers, options.picture)
    if options.json:
        print(
            json.dumps({"labels": list(map(asdict, labels)), "answers": list(map(asdict, answers))}, indent=2)
        )
        return
    print("min_confidence  to large  underserved  overserved   (held-out examples, by their labels)")
    for one in labels:
        shares = f"{one.large:8.3f}  {one.underserved:11.3f}  {one.overserved:10.3f}"
        print(f"{one.threshold:14.2f}  {shares}")
    print("\nmin_confidence  to large  right  by chance  USD per 1000   (real models: a mechanism demo)")
    for point in answers:
        name = {-1.0: "small only", 2.0: "large only"}.get(point.threshold, f"{point.threshold:.2f}")
        rates = f"{point.large:8.3f}  {point.right:5.3f}  {point.coin:9.3f}"
        print(f"{name:>14}  {rates}  {point.usd_per_thousand:12.6f}")


if __name__ == "__main__":
    main()
