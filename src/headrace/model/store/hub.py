"""Pulls ``hf:org/name`` from a Hugging Face hub, through huggingface_hub and into its own cache.

Endpoint, token, cache folder and resuming are huggingface_hub's (HF_ENDPOINT, HF_TOKEN, HF_HOME). What this
adds: only files that a reader opens are fetched, never a pickle, and large files are checked against the
hub's sha256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.errors import DownloadError, HeadraceError, ModelFormatError, ModelNotFoundError
from headrace.model.store.download import disk_full, require_space
from headrace.model.store.local import PICKLE_SUFFIXES, REFUSAL, entry_point
from headrace.model.store.progress import Progress
from headrace.model.store.reference import OFFLINE, HubReference

_COMPANION = re.compile(r"[^/]+\.(?:json|jinja)|tokenizer\.model|vocab\.txt|merges\.txt")
_MODULE = re.compile(r"\d+_[A-Za-z]+/(?:config\.json|model\.safetensors)")  # sentence-transformers


@dataclass(frozen=True, slots=True)
class Pulled:
    """``path`` is what a reader opens; ``files`` lie in ``snapshot``, the folder of revision ``commit``."""

    path: Path
    snapshot: Path
    commit: str
    files: tuple[str, ...]


def choose(names: Iterable[str], reference: HubReference) -> list[str]:
    """The files of a repository to fetch, weights first.

    Safetensors of the top folder with their configuration; else the GGUF file asked for, the only one, or the
    only Q4_K_M one. Raises ModelFormatError for a repository of pickles, ModelNotFoundError when there are no
    weights or several to choose from.
    """
    safe = [name for name in names if not (name.startswith("/") or ".." in PurePosixPath(name).parts)]
    ggufs = sorted(name for name in safe if name.endswith(".gguf"))
    if reference.file is not None:
        if reference.file not in ggufs:
            listed = f"; its GGUF files: {', '.join(ggufs)}" if ggufs else ""
            raise ModelNotFoundError(f"{reference.repo} has no file {reference.file}{listed}", param="model")
        return [reference.file]
    weights = sorted(name for name in safe if name.endswith(".safetensors") and "/" not in name)
    # Some repositories carry the same weights a second time under their authors' own names.
    weights = [name for name in weights if not name.startswith("consolidated")] or weights
    if weights:
        return weights + sorted(n for n in safe if _COMPANION.fullmatch(n) or _MODULE.fullmatch(n))
    if len(ggufs) > 1:
        usual = [name for name in ggufs if "q4_k_m" in name.lower()]
        if len(usual) != 1:
            raise ModelNotFoundError(
                f"{reference.repo} holds several models; name one, as hf:{reference.repo}/{ggufs[0]}: "
                + ", ".join(ggufs),
                param="model",
            )
        ggufs = usual
    if ggufs:
        return ggufs
    if any(name.lower().endswith(PICKLE_SUFFIXES) for name in safe):
        raise ModelFormatError(f"{reference.repo} holds its weights as pickles only. {REFUSAL}")
    raise ModelNotFoundError(f"{reference.repo} holds no *.safetensors or *.gguf file", param="model")


def pull(reference: HubReference, progress: Progress | None) -> Pulled:
    """Fetch what is missing. Raises ModelNotFoundError, ModelFormatError, DownloadError."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    with _translated(reference):
        info = HfApi().model_info(reference.repo, revision=reference.revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        names = choose(siblings, reference)
        cache = Path(constants.HF_HUB_CACHE)
        snapshot = cache / f"models--{reference.repo.replace('/', '--')}" / "snapshots" / str(info.sha)
        missing = [name for name in names if not (snapshot / name).exists()]
        needed = sum(siblings[name].size or 0 for name in missing)
        require_space(cache, needed, str(reference))
        with disk_full(cache, lambda: needed):
            for name in missing:
                path = Path(
                    hf_hub_download(reference.repo, name, revision=info.sha, tqdm_class=_bar(name, progress))
                )
                _verify(path, siblings[name])
                snapshot = path.parents[name.count("/")]
    path = snapshot / names[0] if names[0].endswith(".gguf") else snapshot
    return Pulled(path, snapshot, str(info.sha), tuple(names))


def configuration(reference: HubReference) -> Path | None:
    """The repository's ``config.json`` alone; None if it has none. Raises as :func:`pull`."""
    from huggingface_hub import errors, hf_hub_download

    with _translated(reference):
        try:
            return Path(hf_hub_download(reference.repo, "config.json", revision=reference.revision))
        except errors.LocalEntryNotFoundError:  # a kind of EntryNotFoundError, but it means no answer
            raise
        except errors.EntryNotFoundError:
            return None


def find_offline(reference: HubReference) -> Path:
    """The model as huggingface_hub's cache has it, whoever put it there; never touches the network.

    Raises DownloadError when it is not there, ModelFormatError when it holds no weights that are read.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_id == reference.repo]
    except CacheNotFound:
        repos = []
    revisions = [revision for repo in repos for revision in repo.revisions if repo.repo_type == "model"]
    wanted = reference.revision or "main"
    named = [revision for revision in revisions if wanted in revision.refs or wanted == revision.commit_hash]
    if not named and reference.revision is None:
        named = revisions
    for revision in sorted(named, key=lambda revision: revision.last_modified, reverse=True):
        if reference.file is None:
            return entry_point(revision.snapshot_path)
        if (revision.snapshot_path / reference.file).exists():
            return revision.snapshot_path / reference.file
    raise DownloadError(f"{reference} is not in the local cache, and offline mode is on ({OFFLINE})")


def delete(commit: str) -> None:
    """Remove one revision from huggingface_hub's cache; files that other revisions share stay."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        scan_cache_dir().delete_revisions(commit).execute()
    except CacheNotFound:
        return


@contextmanager
def _translated(reference: HubReference) -> Iterator[None]:
    """Turns huggingface_hub's exceptions, and those of the HTTP library below it, into headrace's."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        raise _translation(error, reference) from error


def _translation(error: Exception, reference: HubReference) -> HeadraceError:
    from huggingface_hub import constants, errors

    where = f"{reference.repo} on {constants.ENDPOINT}"
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{where} is gated: accept its terms on the hub and set HF_TOKEN", param="model"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        text = f"There is no {where}, or it is private and HF_TOKEN is missing or wrong"
        return ModelNotFoundError(text, param="model")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{where} has no revision {reference.revision}", param="model")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return DownloadError(f"Could not fetch {where}: {reason[0]}. Pulling again goes on where this stopped.")


def _bar(name: str, progress: Progress | None) -> type[Any]:
    """A tqdm class that draws nothing and reports to ``progress``."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own addition to tqdm's arguments
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.done = int(kwargs.get("initial") or 0)
            self.whole = int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            if progress is not None:
                progress(name, self.done, self.whole)

    return Bar


def _verify(path: Path, sibling: Any) -> None:
    expected = getattr(sibling.lfs, "sha256", None)
    if expected is None:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise DownloadError(
            f"{sibling.rfilename} is not what the hub promised (sha256 {digest}, expected {expected}); it "
            "was removed: pull again"
        )
