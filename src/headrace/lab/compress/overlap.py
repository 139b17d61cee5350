"""Calibration and evaluation never share a work: a model is not judged by what it was shaped by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.lab.compress.calibration import RUN, Calibration, require_apart
from headrace.lab.evaluate.choices import CHOICE_SUITES, load_cases
from headrace.lab.evaluate.own_suite import read_suite
from headrace.lab.evaluate.text_suite import PERPLEXITY
from headrace.lab.evaluate.texts import Text, load_text, tokenise
from headrace.model.store import Progress

_SHARE = 0.01  # of either side, from which on it is more than a quotation
_STRIDE = 8  # between the runs of a question that are looked for


def require_unseen(
    calibration: Calibration,
    tokenizer: Tokenizer,
    *,
    suites: Sequence[str],
    texts: Sequence[str],
    tokens: int,
    progress: Progress | None = None,
) -> None:
    """Raise ConfigError if the calibration holds what one of ``suites`` will ask, literally.

    Of texts the whole works count, and not only their first ``tokens``, which are scored. Suites that are
    generated (arithmetic, needle, json) and tasks of lm-eval are not looked at.
    """
    if PERPLEXITY in suites:
        _text_unseen(calibration, load_text(texts, progress=progress), tokenizer, tokens)
    runs: set[tuple[int, ...]] | None = None
    for suite in suites:
        questions = list(_questions(suite, progress))
        if not questions:
            continue
        runs = calibration.runs() if runs is None else runs
        found = sum(_is_in(tokenizer.encode(text), runs) for text in questions)
        if found > _SHARE * len(questions):
            raise ConfigError(
                f"{found} of the {len(questions)} questions of {suite} are in the calibration, literally: "
                "the scores would flatter the model. Give another --calibration, or leave the suite out."
            )


def _text_unseen(calibration: Calibration, text: Text, tokenizer: Tokenizer, tokens: int) -> None:
    ids = tokenise(text, tokenizer, len(text.content))
    require_apart(calibration, ids[:tokens])
    work = {tuple(ids[start : start + RUN]) for start in range(0, len(ids) - RUN + 1, RUN)}
    share = RUN * len(work & calibration.runs()) / max(calibration.tokens, 1)
    if share > _SHARE:
        raise ConfigError(
            f"{share:.0%} of the calibration is from the text that is to judge the model, word for word: the "
            "numbers would flatter it. Give another --calibration or another --text."
        )


def _is_in(ids: Sequence[int], runs: set[tuple[int, ...]]) -> bool:
    """Whether any run of a question is there. Its first token depends on what stands before it."""
    return any(tuple(ids[at : at + RUN]) in runs for at in range(1, len(ids) - RUN + 1, _STRIDE))


class _Prompt(BaseModel):
    prompt: str


def _questions(suite: str, progress: Progress | None) -> Iterator[str]:
    """The texts that a suite of fixed questions asks."""
    if suite in CHOICE_SUITES:
        for choice in CHOICE_SUITES[suite](progress=progress):
            yield choice.context + choice.continuations[choice.right]
    elif suite == "gsm8k":
        yield from (case.prompt for case in load_cases("gsm8k", _Prompt, progress=progress))
    elif suite.lower().endswith((".yaml", ".yml")):
        yield from (question.prompt for question in read_suite(Path(suite)).questions)
