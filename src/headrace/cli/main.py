"""The command line as a whole: its commands, and how errors end it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from headrace.cli import (
    bench,
    chat,
    compress,
    diagnose,
    doctor,
    eval,
    gateway,
    models,
    options,
    plan,
    serve,
    tune,
)
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Serve large language models fast, cheaply and dependably; measure first, then optimise.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(diagnose.diagnose)
app.add_typer(models.app, name="models")
app.add_typer(gateway.app, name="gateway")
app.command(name="eval")(eval.evaluate)
app.add_typer(compress.app, name="compress")
app.command()(tune.tune)
app.command()(plan.plan)
app.command()(doctor.doctor)


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


def _misused(error: Any) -> str:
    """One line, with where to read on; nothing if help was what was wanted (it has been printed)."""
    text = " ".join(error.format_message().split())
    if not text or "\n" in error.message:
        return ""
    command = error.ctx.command_path if error.ctx is not None else "headrace"
    return f"headrace: {text.rstrip('.')}; see {command} --help\n"
