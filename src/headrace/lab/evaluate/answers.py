"""Who answers questions: a model in this process. (:mod:`.endpoint`: a model behind HTTP.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.frontend.batch import BatchError
from headrace.frontend.llm import LLM, SamplingParams
from headrace.lab.evaluate.questions import Question
from headrace.lab.evaluate.results import Item
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


def ask(
    questions: Sequence[Question],
    answerer: Answerer,
    *,
    advance: Callable[[int], None] = lambda questions: None,
) -> list[Item]:
    """Every question answered and scored."""
    items = []
    for start in range(0, len(questions), _GROUP):
        group = questions[start : start + _GROUP]
        for question, answer in zip(group, answerer.answer(group), strict=True):
            items.append(
                Item(
                    id=question.id,
                    scores=question.score(answer.text),
                    answer=answer.text,
                    tokens=answer.tokens,
                )
            )
        advance(len(group))
    return items


class LocalAnswerer:
    """A model in this process, through its chat template; a base model continues the prompt instead."""

    def __init__(
        self,
        model: str,
        *,
        quantization: Literal["int8", "int4"] | None = None,
        backend: str = "cpu",
        device: str = "cpu",
        threads: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Raises what loading a model raises."""
        self._llm = LLM(
            model,
            quantization=quantization,
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
                outputs = self._llm.generate([_plain(q) for q in questions], params, use_tqdm=False)
        except BatchError as error:
            outputs = error.outputs
        return [Answer(o.outputs[0].text, len(o.outputs[0].token_ids)) for o in outputs]

    def close(self) -> None:
        """Release the model."""
        self._llm.close()


def messages(question: Question) -> list[dict[str, Any]]:
    """The question as a conversation."""
    system = [] if question.system is None else [{"role": "system", "content": question.system}]
    return [*system, {"role": "user", "content": question.prompt}]


def _plain(question: Question) -> str:
    before = "" if question.system is None else f"{question.system}\n\n"
    return f"{before}{question.prompt}\n"
