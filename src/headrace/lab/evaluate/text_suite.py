"""Perplexity of a text, by a model in this process or behind an endpoint, alone or against a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.lab.evaluate.divergence import (
    Convention,
    Divergence,
    LogProbs,
    LossRatio,
    TextResult,
    Window,
    measure,
    windows_of,
)
from headrace.lab.evaluate.models import Models
from headrace.lab.evaluate.reference_file import ReferenceFile, about, write
from headrace.lab.evaluate.statistics import Estimate, mean, perplexity
from headrace.lab.evaluate.texts import Text, leading_bos, tokenise
from headrace.model.store import Progress

PERPLEXITY = "perplexity"


def score_text(
    text: Text,
    models: Models,
    *,
    convention: Convention,
    context_length: int,
    tokens: int,
    reference_logits: Path | None,
    progress: Progress,
) -> TextResult:
    """The first ``tokens`` of the text. Raises what loading, scoring and asking models raise."""
    tokenizer = models.model.tokenizer()
    if models.reference is not None:
        models.require_same_tokenizer()
    windows = windows_of(
        tokenise(text, tokenizer, tokens), convention, context_length, leading_bos(tokenizer)
    )
    if models.model.path is None:
        found = _scored_remotely(windows, models, context_length, progress)
    else:
        found = _scored_here(windows, models, context_length, reference_logits, progress)
    return TextResult(
        convention=convention,
        context_length=context_length,
        tokenizer=tokenizer.fingerprint,
        windows=len(windows),
        perplexity=found.perplexity,
        reference=found.reference,
        divergence=found.divergence,
        loss_ratio=found.loss_ratio,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    perplexity: Estimate
    reference: str | None = None
    divergence: Divergence | None = None
    loss_ratio: LossRatio | None = None


def _scored_here(
    windows: list[Window],
    models: Models,
    context_length: int,
    reference_logits: Path | None,
    progress: Progress,
) -> _Found:
    model = models.scorer(models.model, context_length)
    reference: LogProbs | None = None
    named: str | None = None
    if reference_logits is not None:
        reference = file = _reference_file(reference_logits, windows, context_length, models, progress)
        named = file.about.reference
    elif models.reference is not None:
        reference = models.scorer(models.reference, context_length)
        named = models.reference.identity()
    advance = _advance(progress, sum(window.scored for window in windows))
    found, divergence = measure(windows, model, reference, advance=advance)
    return _Found(found, named, divergence)


def _scored_remotely(
    windows: list[Window], models: Models, context_length: int, progress: Progress
) -> _Found:
    """Losses only: an endpoint tells no whole distributions."""
    rounds = [models.model] + ([] if models.reference is None else [models.reference])
    advance = _advance(progress, len(rounds) * sum(window.scored for window in windows))
    losses = [
        np.concatenate(models.remote_scorer(one, context_length).losses(windows, advance)) for one in rounds
    ]
    if models.reference is None:
        return _Found(perplexity(losses[0]))
    ratio = LossRatio(reference_perplexity=perplexity(losses[1]), ln_ppl_ratio=mean(losses[0] - losses[1]))
    return _Found(perplexity(losses[0]), models.reference.reference, loss_ratio=ratio)


def _reference_file(
    path: Path, windows: list[Window], context_length: int, models: Models, progress: Progress
) -> ReferenceFile:
    """The file of the reference's logits, which is written first if it does not exist."""
    wanted = about(
        windows,
        tokenizer=models.model.tokenizer().fingerprint,
        vocab_size=models.model.vocab_size(),
        reference="" if models.reference is None else models.reference.identity(),
    )
    if not path.exists():
        assert models.reference is not None  # the settings are checked for it
        done = 0
        scorer = models.scorer(models.reference, context_length)
        for rows in write(path, wanted, windows, scorer):
            done += rows
            progress("reference logits", done, wanted.rows)
    found = ReferenceFile(path)
    found.require(wanted, path, any_reference=models.reference is None)
    return found


def _advance(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(PERPLEXITY, done, total)

    return advance
