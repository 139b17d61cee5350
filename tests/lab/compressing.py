"""Small models, texts and calibration files for tests of compression; and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.cli import main
from tests.lab.small_models import TEXT, make_model

HELD_OUT = "Whoever came late to the mill had to wait for the stone, and the stone waited for nobody. " * 10


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Compress = Callable[..., Done]


def make_files(folder: Path) -> Path:
    """A folder with ``model`` (trained a little, with a template), ``text.txt`` and ``calibration.jsonl``."""
    make_model(folder / "model", chat=True, steps=30)
    (folder / "text.txt").write_text(HELD_OUT)
    lines = [
        {
            "messages": [
                {"role": "user", "content": TEXT[at : at + 60]},
                {"role": "assistant", "content": TEXT},
            ]
        }
        for at in range(0, 160, 10)
    ]
    (folder / "calibration.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def compressor(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compress:
    """``headrace compress quantize MODEL … `` in this process, on the files of :func:`make_files`."""

    def call(*arguments: str, model: str = "model") -> Done:
        capsys.readouterr()
        common = ["--calibration", str(files / "calibration.jsonl"), "--text", str(files / "text.txt")]
        common += ["--sequence-length", "96", "--threads", "1"]
        arguments = ("headrace", "compress", "quantize", str(files / model), *common, *arguments)
        monkeypatch.setattr("sys.argv", list(arguments))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call
