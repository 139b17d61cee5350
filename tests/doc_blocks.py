"""Runs the code blocks of a documentation page, as a reader would: in order, in one folder.

A fence's info string says what a block is, then how to treat it, in braces::

    ```bash                         run by bash, stops at the first failing command
    ```console                      lines with "$ " are commands, what follows each is its output
    ```python                       run by a Python of its own
    ```bash {background}            a server: started, waited for, stopped at the page's end
    ```bash {not-run: needs docker} shown only; the reason is part of the page's source

A bash line that ends in ``&`` makes its block a background block as well. Output under a console command must
appear in what the command prints, line by line and in order; ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUNNABLE = {"bash", "sh", "console", "python"}
READY_TIMEOUT_S = 120.0
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[\w+-]*)[ \t]*(?:\{(?P<notes>[^}]*)\})?[ \t]*$"
)


class DocError(AssertionError):
    """A block failed, or a fence is not understood."""


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its opening fence."""

    page: Path
    line: int
    language: str
    notes: str
    code: str

    @property
    def where(self) -> str:
        """``page:line``, for messages."""
        return f"{self.page.name}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """The reason why the block is only shown, or None."""
        match = re.fullmatch(r"not-run:\s*(\S.*)", self.notes)
        return match[1] if match else None

    @property
    def background(self) -> bool:
        """Whether the block starts something that keeps running."""
        return self.notes == "background" or bool(re.search(r"[^&]&\s*$", self.code))


def blocks(page: Path) -> list[Block]:
    """The page's runnable blocks, in order. Raises DocError for notes that mean nothing."""
    found = []
    lines = iter(enumerate(page.read_text("utf-8").splitlines(), 1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            if line.lstrip().startswith("```"):
                raise DocError(f"{page.name}:{number}: this fence is not understood: {line.strip()}")
            continue
        indent = len(fence["indent"])
        body = []
        for _, inner in lines:
            if inner.strip() == fence["marks"]:
                break
            body.append(inner[indent:] if inner[:indent].isspace() else inner)
        else:
            raise DocError(f"{page.name}:{number}: the block is never closed")
        block = Block(page, number, fence["language"], (fence["notes"] or "").strip(), "\n".join(body) + "\n")
        if block.notes and block.notes != "background" and block.not_run is None:
            raise DocError(
                f"{block.where}: {{{block.notes}}} is neither {{background}} nor {{not-run: reason}}"
            )
        if block.language in RUNNABLE:
            found.append(block)
    return found


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> list[Block]:
    """Run the page's blocks in ``folder`` and return those that ran. Raises DocError at the first failure."""
    ran = []
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for block in blocks(page):
            if block.not_run is not None:
                continue
            if block.background:
                servers.append(_start(block, folder, environment, len(servers)))
            elif block.language == "console":
                _run_console(block, folder, environment)
            else:
                _run(block, _command(block, folder), folder, environment)
            ran.append(block)
    finally:
        for process in servers:
            _stop(process)
    return ran


def _command(block: Block, folder: Path) -> list[str]:
    script = folder / f".block-{block.line}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(block.code, "utf-8")
    return (
        ["python", str(script)] if block.language == "python" else ["bash", "-euo", "pipefail", str(script)]
    )


def _run(block: Block, command: list[str], folder: Path, environment: dict[str, str]) -> str:
    run = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    if run.returncode:
        raise DocError(f"{block.where}: exit status {run.returncode}\n{block.code}\n{run.stdout[-4000:]}")
    return run.stdout


def _run_console(block: Block, folder: Path, environment: dict[str, str]) -> None:
    for command, expected in _transcript(block):
        printed = _run(block, ["bash", "-euo", "pipefail", "-c", command], folder, environment)
        pattern = ".*".join(re.escape(part.strip("\n")) for part in "\n".join(expected).split("..."))
        if re.search(pattern, printed, re.DOTALL) is None:
            wanted = "\n".join(expected)
            raise DocError(f"{block.where}: $ {command}\nexpected:\n{wanted}\nprinted:\n{printed[-4000:]}")


def _transcript(block: Block) -> Iterator[tuple[str, list[str]]]:
    command: str | None = None
    output: list[str] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, output
            command, output = line[2:], []
        elif command is not None and command.endswith("\\"):
            command += "\n" + line.removeprefix("> ")
        elif command is None:
            raise DocError(f"{block.where}: a console block begins with a command: $ ...")
        else:
            output.append(line)
    if command is not None:
        yield command, output


def _start(block: Block, folder: Path, environment: dict[str, str], number: int) -> subprocess.Popen[bytes]:
    """Start a background block and wait until the port it names accepts connections and says it is ready."""
    log = folder / f".server-{number}.log"
    code = re.sub(r"&\s*$", "", block.code.rstrip())
    port = _port(code)
    if _in_use(port):
        raise DocError(
            f"{block.where}: something else listens on port {port}; stop it, then test the docs again"
        )
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            _stop(process)
            printed = log.read_text("utf-8", errors="replace")[-4000:]
            raise DocError(f"{block.where}: nothing became ready on port {port}\n{block.code}\n{printed}")
        time.sleep(0.02)
    return process


def _port(code: str) -> int:
    match = re.search(r"--port[ =](\d+)", code) or re.search(r"http\.server (\d+)", code)
    return int(match[1]) if match else 8000


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/readiness", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404  # some other server, and it answers
    except (OSError, urllib.error.URLError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def reader_environment(folder: Path) -> dict[str, str]:
    """The environment of someone who has just installed headrace: this Python's programs come first."""
    home = str(Path(sys.executable).parent)
    path = home + os.pathsep + os.environ["PATH"]
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "PWD": str(folder)}
