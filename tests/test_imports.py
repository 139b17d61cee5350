"""The import arrows of the house, and the lightness of ``import headrace``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.import_rules import ALLOWED, broken_imports

SOURCE = Path(__file__).parent.parent / "src" / "headrace"


def test_no_room_imports_what_it_may_not() -> None:
    broken = broken_imports(SOURCE)
    assert not broken, "\n" + "\n".join(map(str, broken))


def test_every_room_of_the_source_is_in_the_rules() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    rooms = {room for room in rooms if not room.startswith(("_", "."))}
    assert rooms - {"py.typed"} <= set(ALLOWED)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("model/x.py", "from headrace.backend.batch import Batch"),
        ("model/store/x.py", "import headrace.engine.request"),
        ("model/x.py", "def f():\n    from headrace.engine import config"),
        ("model/x.py", "from ..backend import batch"),
        ("model/store/x.py", "from ...backend import batch"),
        ("model/x.py", "from .. import backend"),
        ("model/x.py", "from headrace import LLM"),
        (
            "model/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.engine import a",
        ),
        ("engine/x.py", "import importlib\nimportlib.import_module('headrace.frontend.llm')"),
        ("gateway/x.py", "from headrace.server import app"),
        ("web/x.py", "from headrace.gateway import app"),
        ("observe/x.py", "from headrace.engine import request"),
        ("errors.py", "from headrace.engine import request"),
        ("fleet/x.py", "from headrace.backend.cpu import runner"),
        ("lab/x.py", "from headrace.engine import request"),
        ("attic/x.py", "import os"),
        ("__init__.py", "from headrace.engine.request import SamplingParams"),
        ("frontend/x.py", "import torch"),
        ("model/x.py", "class A:\n    import transformers.models"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    [broken] = broken_imports(tmp_path)
    assert str(broken.path) == file
    assert str(broken.line) in str(broken)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("model/x.py", "from headrace.model.store import resolve\nfrom headrace.errors import HeadraceError"),
        ("model/store/x.py", "from . import catalogue\nfrom ..architecture import Architecture"),
        ("model/x.py", "from headrace import __version__\nfrom headrace import paths"),
        ("frontend/x.py", "from headrace.engine.request import SamplingParams\nimport headrace.observe.logs"),
        (
            "fleet/x.py",
            "from headrace.backend.simulated import runner\nfrom headrace.backend import simulated",
        ),
        ("gateway/x.py", "from headrace.web.http import read_body\nimport headrace.yaml_file"),
        ("cli/x.py", "from headrace.server.app import app\nimport headrace.lab"),
        ("__init__.py", "if TYPE_CHECKING:\n    from headrace.frontend.llm import LLM"),
        ("frontend/x.py", "def f():\n    import torch"),
        ("frontend/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("backend/torch/x.py", "import torch"),
        ("model/x.py", "import headrace_else, json"),
    ],
)
def test_an_allowed_import_is_not_reported(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert broken_imports(tmp_path) == []


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def test_import_headrace_is_light() -> None:
    """Every command pays for it; the time is printed, the list of modules is what is held."""
    code = "import sys, headrace; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    heavy = {
        "numpy",
        "torch",
        "fastapi",
        "pydantic",
        "rich",
        "typer",
        "tokenizers",
        "huggingface_hub",
        "msgspec",
    }
    assert not heavy & loaded
    extra = [_seconds("import headrace") - _seconds("pass") for _ in range(5)]
    print(f"import headrace: {1000 * statistics.median(extra):.0f} ms beyond the interpreter's own start")
    assert min(extra) < 0.15
