"""Who answers questions: a model in this process. (:mod:`.endpoint`: a model behind HTTP.)"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.backend.kv_format import KVCacheDtype
from headrace.frontend.batch import BatchError
from headrace.frontend.llm import LLM, SamplingParams
from headrace.lab.evaluate.checks import Rubric
from headrace.lab.evaluate.questions import Question
from headrace.lab.evaluate.results import Item, Judgement
from headrace.model.store import Progress

_GROUP = 32  # questions handed over at a time: full batches, and news of progress in between


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said; ``tokens`` is its length if that is known."""

    text: str
    tokens: int | None


class Answerer(Protocol):
    """A model that answers; greedy, so that the same question gets the same answer."""

    context_length: int | None  # tokens of prompt and answer together, if known

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; behind an endpoint an estimate of one per four characters."""
        ...

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


class Judges(Protocol):
    """Who is asked about rubrics."""

    def judge(self, cases: Sequence[tuple[str, str, str, Rubric]]) -> list[Judgement]:
        """Of each (id, question, answer, rubric) what was said, in order."""
        ...


def ask(
    questions: Sequence[Question],
    answerer: Answerer,
    judge: Judges | None = None,
    *,
    advance: Callable[[int], None] = lambda questions: None,
) -> list[Item]:
    """Every question answered and scored, several at a time: scoring may execute code."""
    items = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(questions), _GROUP):
            group = questions[start : start + _GROUP]
            answers = answerer.answer(group)
            outcomes = pool.map(lambda pair: pair[0].score(pair[1].text), zip(group, answers, strict=True))
            found = [
                Item(
                    id=question.id,
                    scores=outcome.scores,
                    answer=answer.text,
                    tokens=answer.tokens,
                    remark=outcome.remark,
                )
                for question, answer, outcome in zip(group, answers, outcomes, strict=True)
            ]
            if judge is not None:
                _judge(group, found, judge)
            items += found
            advance(len(group))
    return items


def _judge(questions: Sequence[Question], items: Sequence[Item], judge: Judges) -> None:
    """Verdicts on the answers that passed so far. One that is missing leaves its item without a score."""
    asked = [
        (item, question, rubric)
        for item, question in zip(items, questions, strict=True)
        if all(item.scores.values())
        for rubric in question.rubrics
    ]
    verdicts = judge.judge([(q.id, q.prompt, item.answer or "", rubric) for item, q, rubric in asked])
    for (item, _, _), verdict in zip(asked, verdicts, strict=True):
        item.judged = [*(item.judged or []), verdict]
    for item in items:
        said = [verdict.passed for verdict in item.judged or []]
        if False in said:  # one that is not kept to is enough
            item.scores = dict.fromkeys(item.scores, 0.0)
        elif None in said:
            item.scores = {}


class LocalAnswerer:
    """A model in this process, through its chat template; a base model continues the prompt instead."""

    def __init__(
        self,
        model: str,
        *,
        quantization: Literal["int8", "int4"] | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        backend: str = "cpu",
        device: str = "cpu",
        threads: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Raises what loading a model raises."""
        self._llm = LLM(
            model,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            backend=backend,
            device=device,
            threads=threads,
            progress=progress,
        )
        frontend = self._llm.frontend
        self.context_length: int | None = frontend.max_model_len
        self._chats = frontend.tokenizer.chat_template is not None

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._llm.frontend.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions; a sequence that failed gives what it had said so far."""
        params = [SamplingParams(temperature=0.0, max_tokens=q.max_tokens) for q in questions]
        try:
            if self._chats:
                outputs = self._llm.chat([messages(q) for q in questions], params, use_tqdm=False)
            else:
                for question, its in zip(questions, params, strict=True):
                    its.stop = list(question.stop)
                outputs = self._llm.generate([_plain(q) for q in questions], params, use_tqdm=False)
        except BatchError as error:
            outputs = error.outputs
        return [Answer(o.outputs[0].text, len(o.outputs[0].token_ids)) for o in outputs]

    def complete(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[str]:
        """What the model writes after prompts of token ids, without its chat template."""
        outputs = self._llm.generate([*prompts], [*params], use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def close(self) -> None:
        """Release the model."""
        self._llm.close()


def messages(question: Question) -> list[dict[str, Any]]:
    """The question as a conversation, in which its examples have been asked and answered."""
    turns = [] if question.system is None else [{"role": "system", "content": question.system}]
    for prompt, answer in question.examples:
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return [*turns, {"role": "user", "content": question.prompt}]


def _plain(question: Question) -> str:
    if question.continued is not None:
        return question.continued
    before = "" if question.system is None else f"{question.system}\n\n"
    examples = "".join(f"{prompt}\n{answer}\n\n" for prompt, answer in question.examples)
    return f"{before}{examples}{question.prompt}\n"
