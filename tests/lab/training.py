"""A small teacher, data to learn from, and the commands that train, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.lab.compress.training.report import TrainingReport
from tests.lab.compressing import HELD_OUT, Done
from tests.lab.small_models import TEXT, make_model

Train = Callable[..., Done]

LINES = (
    "The miller opened the gate, and the water came down the race to the wheel.",
    "Whoever grinds first eats first, said the miller, and lifted the sluice by a hand.",
    "In spring the river was high, and the stones turned by day and by night.",
    "The baker's boy fell asleep on the sacks, white with flour like a ghost.",
    "When the race froze over, the village ate porridge and waited for the thaw.",
)


def make_files(folder: Path) -> Path:
    """A folder with ``model``, trained a little, its template, ``data.jsonl``, ``text.txt`` and
    ``two.yaml``: sizes of a student of two layers."""
    make_model(folder / "model", chat=True, steps=30)
    (folder / "text.txt").write_text(HELD_OUT)
    (folder / "two.yaml").write_text("layers: 2\n")
    lines: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
        for ask in LINES
        for say in LINES
        if ask != say
    ]
    lines += [{"text": TEXT[at : at + 90]} for at in range(0, 70, 7)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def trainer(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    """``headrace compress COMMAND …`` in this process, on the files of :func:`make_files`."""

    def call(command: str, *arguments: str, model: str = "model") -> Done:
        capsys.readouterr()
        common = ["--data", str(files / "data.jsonl"), "--sequence-length", "64", "--threads", "1"]
        if command != "draft":
            common += ["--text", str(files / "text.txt"), "--tokens", "64"]
        monkeypatch.setattr(
            "sys.argv", ["headrace", "compress", command, str(files / model), *common, *arguments]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call


def read_training(folder: Path) -> TrainingReport:
    """The report in a student's folder."""
    return TrainingReport.model_validate_json((folder / "training.json").read_bytes())
