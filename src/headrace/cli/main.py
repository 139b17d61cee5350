"""The command line as a whole: its commands, and how errors end it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.cli import options
from headrace.errors import HeadraceError

_COMMANDS = {
    "serve": "serve.serve",
    "chat": "chat.chat",
    "bench": "bench.bench",
    "diagnose": "diagnose.diagnose",
    "eval": "eval.evaluate",
    "tune": "tune.tune",
    "plan": "plan.plan",
    "doctor": "doctor.doctor",
    "models": "models.app",
    "gateway": "gateway.app",
    "compress": "compress.app",
}
"""Where in ``headrace.cli`` each command is: a function, or a typer application of several commands."""


class _Commands(TyperGroup):
    """Makes a command when it is asked for: importing and making all of them takes longer than serving needs
    to load a model."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # one that there is not may be meant for any of them
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.commands[name] = _made(name)
        return self.commands.get(cmd_name)


def _made(name: str) -> Any:
    module, _, attribute = _COMMANDS[name].partition(".")
    what: Any = getattr(importlib.import_module(f"headrace.cli.{module}"), attribute)
    if isinstance(what, typer.Typer):
        made = typer.main.get_group(what)
        made.name = name
        return made
    alone = typer.Typer(add_completion=False)
    alone.command(name)(what)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    help="Serve large language models fast, cheaply and dependably; measure first, then optimise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed (one line on stderr), 2 misused, 130 interrupted."""
    sys.unraisablehook = _interrupt_again
    try:
        sys.exit(app(prog_name="headrace", standalone_mode=False))
    except options.MISUSE as error:
        print(_misused(error), end="", file=sys.stderr)
        sys.exit(2)
    except HeadraceError as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output has left; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a file or folder of the user's: full, forbidden, gone
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C may come while Python runs what may not raise, as an object is freed: then once more."""
    if lost.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident, signal.SIGINT
        later = threading.Timer(0.01, signal.pthread_kill, main_thread)  # now, it would be lost in here
        later.daemon = True
        later.start()
    else:
        sys.__unraisablehook__(lost)


def _misused(error: Any) -> str:
    """One line, with where to read on; nothing if help was what was wanted (it has been printed)."""
    text = " ".join(error.format_message().split())
    if not text or "\n" in error.message:
        return ""
    command = error.ctx.command_path if error.ctx is not None else "headrace"
    return f"headrace: {text.rstrip('.')}; see {command} --help\n"
