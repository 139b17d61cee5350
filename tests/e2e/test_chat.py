"""headrace chat, piped and in a terminal."""

from __future__ import annotations

import array
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import IO

from tests.e2e.running import COMMAND, run

ONE_THREAD = ("--threads", "1")  # there are other tests for the other cores


def test_piped_text_is_one_prompt_and_only_the_answer_is_printed(smollm2_path: Path) -> None:
    ended = run(
        "chat",
        *ONE_THREAD,
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        text="What is the capital of France? Answer with one word.\n",
    )
    assert ended.returncode == 0
    assert "Paris" in ended.stdout
    assert "tokens/s" not in ended.stdout
    assert ended.stderr == ""


def test_raw_continues_the_text(smollm2_path: Path) -> None:
    ended = run(
        "chat",
        *ONE_THREAD,
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        text="The capital of France is",
    )
    assert ended.returncode == 0
    assert "Paris" in ended.stdout


def test_a_base_model_continues_a_sentence(gemma3_path: Path) -> None:
    """It has no chat template: --raw works, and without it the error says so."""
    arguments = ("chat", *ONE_THREAD, "-m", "gemma3-270m", "--temperature", "0", "--max-tokens", "5")
    ended = run(*arguments, "--raw", text="One, two, three, four,")
    assert ended.returncode == 0
    assert "five, six" in ended.stdout
    refused = run(*arguments, text="The capital of France is")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "--raw" in line


def test_empty_input_is_refused() -> None:
    ended = run("chat", text="  \n")
    assert ended.returncode == 1
    assert "empty" in ended.stderr


def test_ctrl_c_exits_with_130() -> None:
    """Also while the prompt is still being read; no traceback."""
    chat = subprocess.Popen([*COMMAND, "chat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert chat.stdin is not None
    chat.stdin.write("What is")
    chat.stdin.flush()
    deadline = time.monotonic() + 60
    while _unread(chat.stdin):
        assert time.monotonic() < deadline and chat.poll() is None
        time.sleep(0.01)
    chat.send_signal(signal.SIGINT)
    _, printed = chat.communicate(timeout=60)
    assert chat.returncode == 130
    assert "Traceback" not in printed


def _unread(pipe: IO[str]) -> int:
    """How many bytes in a pipe nobody has taken yet."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


class Terminal:
    """``headrace chat`` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "chat", *ONE_THREAD, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(slave)
        self.text = ""
        self._waited_for = 0  # how much of it

    def wait_for(self, text: str, timeout_s: float = 120.0) -> str:
        """Read until ``text`` comes; everything since what was waited for before, ``text`` included."""
        start = self._waited_for
        deadline = time.monotonic() + timeout_s
        while text not in self.text[start:]:
            ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, self.text
            self.text += os.read(self._master, 65536).decode(errors="replace")
        self._waited_for = self.text.index(text, start) + len(text)
        return self.text[start : self._waited_for]

    def type(self, text: str) -> None:
        """What a user types."""
        os.write(self._master, text.encode())

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_a_conversation_in_a_terminal(smollm2_path: Path) -> None:
    terminal = Terminal("--temperature", "0", "--max-tokens", "24")
    try:
        terminal.wait_for("> ")
        terminal.type("What is the capital of France? Answer with one word.\n")
        assert "Paris" in terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("/clear")
        terminal.type("/clear\n")
        terminal.wait_for("forgotten")
        terminal.type("/nonsense\n")
        terminal.wait_for("there is no /nonsense")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(smollm2_path: Path) -> None:
    terminal = Terminal("--max-tokens", "4000", "--raw")
    try:
        terminal.wait_for("> ")
        terminal.type("Once upon a time\n")
        terminal.wait_for("time\r\n")  # the echo of what was typed
        terminal.wait_for(" ")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
