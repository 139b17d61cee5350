"""Ctrl-C ends a command, whatever Python was doing."""

from __future__ import annotations

import subprocess
import sys

COMMAND = """
import os, signal, sys, time
import headrace.cli.main
main = sys.modules["headrace.cli.main"]

class Freed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def command(**_):
    Freed()
    time.sleep(20)

main.app = command
main.main()
"""


def test_it_is_not_lost_while_an_object_is_freed() -> None:
    """What is raised there is printed and forgotten: an evaluation once went on to its end."""
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
