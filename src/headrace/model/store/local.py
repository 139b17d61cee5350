"""Files and folders of the user's own, and the refusal of pickles."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ModelFormatError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
REFUSAL = (
    "Pickle files can run code when they are opened, so they are never read: convert the model to "
    "safetensors (`model.save_pretrained(folder)` in transformers writes it) or to GGUF."
)


def entry_point(path: Path) -> Path:
    """What a reader opens: the file itself, a folder with safetensors, or the only GGUF file of a folder.

    Raises ModelFormatError for a pickle, for a folder with nothing but pickles, with no weights, or with
    several GGUF files to choose from.
    """
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() in PICKLE_SUFFIXES or _is_pickle(path):
        raise ModelFormatError(f"{path} is a pickle. {REFUSAL}")
    return path


def _folder(path: Path) -> Path:
    names = sorted(child.name for child in path.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return path
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return path / ggufs[0]
    if ggufs:
        raise ModelFormatError(f"{path} holds several models, name one of them: {', '.join(ggufs)}")
    if pickles := [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]:
        raise ModelFormatError(f"{path} holds no weights but a pickle, {pickles[0]}. {REFUSAL}")
    raise ModelFormatError(f"{path} holds no *.safetensors or *.gguf file")


def _is_pickle(path: Path) -> bool:
    """Whether the contents are a pickle, or a zip around one (torch.save), whatever the name says."""
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        # Safetensors files start with a length in 8 bytes, which can look the same.
        return path.suffix.lower() not in (".safetensors", ".gguf")
    if head == b"PK\x03\x04":
        import zipfile

        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    return False
