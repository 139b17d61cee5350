"""Writing safetensors as tensors come: no file is ever held in memory.

Format: github.com/huggingface/safetensors, "Format". Its header stands first and names every tensor; room for
it is left, and what it does not need is filled with spaces, which the format allows.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import Self

SHARD_BYTES = 5_000_000_000
"""Files grow no larger than that, and one tensor."""

_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
_ALIGNMENT = 8  # of the widest type: torch maps tensors where they lie
_ENTRY_BYTES = 300  # of a tensor's line in the header, its name included


class Shards:
    """The safetensors files of ``folder``; a context. One is ``model.safetensors``, several have an index.

    ``tensors``: how many will be written at most. Raises OSError.
    """

    def __init__(self, folder: Path, tensors: int, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._room = -(-(1024 + _ENTRY_BYTES * tensors) // _ALIGNMENT) * _ALIGNMENT
        self._limit = shard_bytes
        self._file: IO[bytes] | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: list[tuple[str, NDArray[Any]]] = []  # of sizes that would misalign what follows
        self._done: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish_file()
            self._name_files()
        elif self._file is not None:
            self._file.close()

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor of one of the dtypes that the format has."""
        if self._file is None:
            self._file = (self._folder / f"{len(self._done)}.part").open("wb")
            self._file.seek(8 + self._room)
        self.total_bytes += array.nbytes
        if array.nbytes % _ALIGNMENT:
            self._waiting.append((name, array))
        else:
            self._append(name, array)
        if self._file.tell() - 8 - self._room >= self._limit:
            self._finish_file()

    def _append(self, name: str, array: NDArray[Any]) -> None:
        assert self._file is not None
        start = self._file.tell() - 8 - self._room
        # bfloat16 and float8 have no buffer protocol
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._entries[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }

    def _finish_file(self) -> None:
        if self._file is None:
            return
        for name, array in sorted(self._waiting, key=lambda waiting: -waiting[1].dtype.itemsize):
            self._append(name, array)
        self._waiting.clear()
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")
        ).encode()
        if len(header) > self._room:
            raise ValueError(f"{len(self._entries)} tensors are more than were announced")
        with self._file as file:
            file.seek(0)
            file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._done.append((Path(self._file.name), list(self._entries)))
        self._file, self._entries = None, {}

    def _name_files(self) -> None:
        count = len(self._done)
        if count == 1:
            self._done[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._done, 1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
