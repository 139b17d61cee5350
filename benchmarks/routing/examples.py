"""Writes the labelled examples of the shipped intent classifier, the same ones every time.

``python benchmarks/routing/examples.py`` fills the templates beside it and writes ``training.jsonl`` and
``held-out.jsonl`` into the package; ``headrace gateway route train`` makes the classifier of them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PACKAGED = HERE.parent.parent / "src" / "headrace" / "gateway" / "intents"
FOR_EACH_INTENT = 140  # of templates; single examples come on top
_SLOT = re.compile(r"\{(\w+)\}")
_NUMBERS = {"n": (20, 400), "m": (3, 90)}
_SYSTEM = ("You are a helpful assistant.", "You are a concise assistant. Today is 4 May.")


def read(name: str) -> Any:
    """A YAML file of this folder."""
    return yaml.safe_load((HERE / name).read_text("utf-8"))


class Filler:
    """Fills slots, each value about as often as the others."""

    def __init__(self, seed: int) -> None:
        content = read("templates.yaml")
        self._random = random.Random(seed)
        self._values: dict[str, list[Any]] = dict(content["slots"])
        for many in ("passages", "reviews", "messages", "snippets"):
            self._values[many.removesuffix("s")] = [" ".join(text.split()) for text in content[many]]
        self._left: dict[str, list[Any]] = {}

    def fill(self, template: dict[str, Any]) -> tuple[str, float]:
        """A text and its difficulty."""
        difficulties: list[float] = []

        def value(match: re.Match[str]) -> str:
            slot = match[1]
            if slot in _NUMBERS:
                return str(self._random.randint(*_NUMBERS[slot]))
            found = self._next(slot)
            if isinstance(found, list):
                difficulties.append(found[1])
                return str(found[0])
            return str(found)

        text = template["text"].replace("{{", "\0").replace("}}", "\1")
        text = _SLOT.sub(value, text).replace("\0", "{").replace("\1", "}")
        return text, template.get("difficulty", max(difficulties, default=0.3))

    def roughen(self, text: str) -> str:
        """Now and then as people really write: no capitals, a greeting, a system prompt in front."""
        throw = self._random.random()
        if throw < 0.08:
            return text[0].lower() + text[1:].rstrip(".?!")
        if throw < 0.12:
            return f"Hi, {text[0].lower()}{text[1:]}"
        if throw < 0.16:
            return f"{text} Thanks!"
        if throw < 0.2:
            return f"{self._random.choice(_SYSTEM)}\n\n{text}"
        return text

    def _next(self, slot: str) -> Any:
        if not self._left.get(slot):
            self._left[slot] = self._random.sample(self._values[slot], len(self._values[slot]))
        return self._left[slot].pop()


def training(seed: int) -> list[dict[str, Any]]:
    """All examples to train on."""
    filler = Filler(seed)
    out: list[dict[str, Any]] = []
    more = read("more_templates.yaml")
    for intent, templates in read("templates_by_intent.yaml").items():
        templates += [
            {"text": text} if difficulty is None else {"text": text, "difficulty": difficulty}
            for difficulty, text in more[intent]
        ]
        seen: set[str] = set()
        for turn in range(10 * FOR_EACH_INTENT):
            number = turn % len(templates)
            text, difficulty = filler.fill(templates[number])
            text = filler.roughen(text)
            if text not in seen and len(seen) < FOR_EACH_INTENT:
                seen.add(text)
                out.append(row(text, intent, difficulty, f"{intent}-{number + 1}"))
    return out + single("singles.yaml")


def single(name: str) -> list[dict[str, Any]]:
    """The examples of a file of single ones."""
    return [
        row(text, intent, difficulty, f"{intent}-single-{number}")
        for intent, examples in read(name).items()
        for number, (difficulty, text) in enumerate(examples, 1)
    ]


def row(text: str, intent: str, difficulty: float, group: str) -> dict[str, Any]:
    """One line of a labelled file."""
    return {"text": text.strip(), "intent": intent, "difficulty": difficulty, "group": group}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """As JSON Lines."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows), "utf-8")


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=PACKAGED, help="where to write")
    options = parser.parse_args()
    write(options.folder / "training.jsonl", training(seed=7))
    write(options.folder / "held-out.jsonl", single("held_out.yaml"))


if __name__ == "__main__":
    main()
