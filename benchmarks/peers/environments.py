"""Each engine's own virtual environment, and its own format of a model, both kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalogue import Form, Peer
from filelock import FileLock

from headrace.paths import cache_dir

INSTALL_TIMEOUT_S = 3600.0
_BLAS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # tuned for one program, they slow others
_NO_COMPILED_MODULES = "PYTHONDONTWRITEBYTECODE"  # an installed engine has them


class Unavailable(Exception):
    """Why an engine, or a format of its, can't be measured here: one line."""


def home() -> Path:
    """Where environments and converted models are."""
    return cache_dir() / "peers"


@contextmanager
def making() -> Iterator[None]:
    """One process at a time installs or converts; others wait, and then find what it has made."""
    home().mkdir(parents=True, exist_ok=True)
    # One object in this process: converting installs, too.
    with FileLock(home() / "making.lock", is_singleton=True):
        yield


def child_environment(peer: Peer, threads: int) -> dict[str, str]:
    """The variables of an engine's process: ours, without what would slow it, with its own."""
    without = (*_BLAS, _NO_COMPILED_MODULES)
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {
        **kept,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **peer.environment,
    }


def python_of(peer: Peer) -> Path:
    """The Python that has this engine, installed first if it is not. Raises Unavailable."""
    if not peer.requirements:
        return Path(sys.executable)
    folder = home() / peer.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "requirements.txt"
    wanted = "\n".join([*peer.requirements, *(f"# without {name}" for name in peer.unwanted)]) + "\n"
    with making():
        if not (stamp.is_file() and stamp.read_text() == wanted and python.exists()):
            _install(peer, folder, python)
            stamp.write_text(wanted)
    return python


def _install(peer: Peer, folder: Path, python: Path) -> None:
    if shutil.disk_usage(home()).free < peer.disk_bytes:
        raise Unavailable(f"not installed: it needs {peer.disk_bytes >> 30} GiB of disk in {home()}")
    print(f"installing {peer.name}: {' '.join(peer.requirements)}", file=sys.stderr, flush=True)
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "-q", *peer.requirements])
        if peer.unwanted:
            _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *peer.unwanted])
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"not installed: {_last_words(error)}") from None


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)


def _last_words(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line for line in (said or "").splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else str(error)


def converted(peer: Peer, form: Form, model_name: str) -> Path:
    """Where an engine's own format of a model is or will be."""
    return home() / "models" / model_name / f"{peer.name}-{form.name}{form.ending}"


def clear(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
