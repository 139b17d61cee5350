"""Where pip would look for packages: the same index, mirrors and certificates serve the model store.

Reads pip's configuration files and ``PIP_*`` variables in pip's own order of precedence
(https://pip.pypa.io/en/stable/topics/configuration/); pip itself need not be installed.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

DEFAULT_INDEX = "https://pypi.org/simple"


@dataclass(frozen=True, slots=True)
class PipSettings:
    """``index_urls`` by preference, empty with ``no-index``; ``find_links``: pages, folders or wheels."""

    index_urls: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    timeout_s: float = 15.0


def read_settings() -> PipSettings:
    """The settings in force. Raises ConfigError naming a file that cannot be read as one of pip's."""
    values: dict[str, str] = {}
    for path in _files():
        values.update(_file_values(path))
    for variable, value in os.environ.items():
        if variable.startswith("PIP_") and value:
            values[variable[4:].lower().replace("_", "-")] = value
    no_index = values.get("no-index", "").strip().lower() in {"1", "true", "yes", "on"}
    index = values.get("index-url", values.get("pypi-url", DEFAULT_INDEX)).strip()
    urls = () if no_index else (index, *values.get("extra-index-url", "").split())
    try:
        timeout_s = float(values.get("timeout", values.get("default-timeout", "15")))
    except ValueError:
        raise ConfigError(f"pip's timeout is not a number: {values.get('timeout')!r}") from None
    return PipSettings(
        tuple(url.rstrip("/") for url in urls),
        tuple(values.get("find-links", "").split()),
        values.get("cert", "").strip() or None,
        timeout_s,
    )


def _files() -> Iterator[Path]:
    """Existing configuration files, the weakest first."""
    chosen = os.environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path.home()
    if sys.platform == "darwin":
        shared = [Path("/Library/Application Support/pip/pip.conf")]
        own = home / "Library/Application Support/pip/pip.conf"
        if not own.parent.is_dir():
            own = home / ".config/pip/pip.conf"
    else:
        folders = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
        shared = [Path(folder) / "pip/pip.conf" for folder in reversed(folders.split(os.pathsep))]
        shared.append(Path("/etc/pip.conf"))
        own = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    candidates = [*shared, home / ".pip/pip.conf", own, Path(sys.prefix) / "pip.conf"]
    if chosen:
        candidates.append(Path(chosen))
    for path in candidates:
        if path.is_file():
            yield path


def _file_values(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pip's settings in {path} cannot be read: {error}") from error
    values: dict[str, str] = {}
    for section in ("global", "download"):
        if parser.has_section(section):
            values.update({key.replace("_", "-"): value or "" for key, value in parser.items(section)})
    return values
