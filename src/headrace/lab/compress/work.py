"""The folder of an unfinished compression: layers that are finished, and from what they were made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.lab.compress.quantized import QuantizedLinear, Scheme

if TYPE_CHECKING:
    from typing import Self

_VERSION = 2
_ARRAYS = ("codes", "scale", "zero", "g_idx")


class Work:
    """One compression's finished layers, for one program at a time; a context.

    ``about``: all that the layers depend on. What another compression left here is removed. Files appear
    whole or not at all: each is written beside its place, and renamed. Raises ConfigError if the folder is in
    use.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self._about = json.loads(json.dumps(about | {"version": _VERSION}))
        self._lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=0)

    def matches(self) -> bool:
        """Whether what is there belongs to this compression."""
        return bool(self._found() == self._about)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(
                f"Another headrace compress is at work on {self.path.name.strip('.')}: wait for it, "
                "or end it."
            ) from None
        if self.path.exists() and not self.matches():
            shutil.rmtree(self.path)
        self.path.mkdir(exist_ok=True)
        for unfinished in self.path.glob("*.part"):
            unfinished.unlink()
        replace(self.path / "about.json", json.dumps(self._about, indent=1).encode())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)

    def finished(self) -> int:
        """How many layers are done, from the first on."""
        count = 0
        while self._layer(count).exists():
            count += 1
        return count

    def stream(self, index: int) -> NDArray[np.float32] | None:
        """The residual stream after that many layers, if it was kept."""
        path = self._stream(index)
        if not path.exists():
            return None
        try:
            found: NDArray[np.float32] = np.load(path, allow_pickle=False)
        except (ValueError, EOFError):
            raise self._damaged(path) from None
        return found

    def keep_stream(self, index: int, stream: NDArray[np.float32]) -> None:
        """Keep the residual stream after ``index`` layers; the layer itself is not finished by that."""
        unfinished = self._stream(index).with_suffix(".part")
        with unfinished.open("wb") as file:
            np.save(file, stream, allow_pickle=False)
        unfinished.replace(self._stream(index))

    def keep_value(self, name: str, value: Any) -> None:
        """Keep a small result, as JSON."""
        replace(self.path / f"{name}.json", json.dumps(value).encode())

    def value(self, name: str) -> Any:
        """What :meth:`keep_value` kept, or None."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_bytes()) if path.exists() else None

    def keep_layer(
        self,
        index: int,
        rounded: dict[str, QuantizedLinear],
        dense: dict[str, NDArray[np.float32]],
        remarks: dict[str, Any],
    ) -> None:
        """Finish a layer. The stream before it is not needed any more, and removed."""
        from safetensors.numpy import save

        arrays: dict[str, NDArray[Any]] = {f"{name}#dense": array for name, array in dense.items()}
        schemes = {}
        for name, linear in rounded.items():
            schemes[name] = {key: getattr(linear.scheme, key) for key in Scheme.__slots__}
            for key in _ARRAYS:
                if (array := getattr(linear, key)) is not None:
                    arrays[f"{name}#{key}"] = np.ascontiguousarray(array)
        metadata = {"schemes": json.dumps(schemes), "remarks": json.dumps(remarks)}
        replace(self._layer(index), save(arrays, metadata))
        self._stream(index).unlink(missing_ok=True)

    def layer(self, index: int) -> tuple[dict[str, QuantizedLinear | NDArray[np.float32]], dict[str, Any]]:
        """A finished layer's tensors, as they were kept, and the remarks on it."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._layer(index), framework="np") as file:
                metadata = file.metadata()
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
        except SafetensorError:
            raise self._damaged(self._layer(index)) from None
        tensors: dict[str, QuantizedLinear | NDArray[np.float32]] = {
            key.removesuffix("#dense"): array for key, array in arrays.items() if key.endswith("#dense")
        }
        for name, scheme in json.loads(metadata["schemes"]).items():
            tensors[name] = QuantizedLinear(
                arrays[f"{name}#codes"],
                arrays[f"{name}#scale"],
                Scheme(**scheme),
                zero=arrays.get(f"{name}#zero"),
                g_idx=arrays.get(f"{name}#g_idx"),
            )
        return tensors, json.loads(metadata["remarks"])

    def remarks(self, index: int) -> dict[str, Any]:
        """The remarks on a finished layer. Raises ConfigError if its file is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._layer(index), framework="np") as file:
                found: dict[str, Any] = json.loads(file.metadata()["remarks"])
        except SafetensorError:
            raise self._damaged(self._layer(index)) from None
        return found

    def remove(self) -> None:
        """Nothing of it is needed any more."""
        shutil.rmtree(self.path)

    def _damaged(self, path: Path) -> ConfigError:
        return ConfigError(f"{path} is damaged: remove the folder {self.path} to start afresh.")

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index:05}.safetensors"

    def _stream(self, index: int) -> Path:
        return self.path / f"stream-{index:05}.npy"

    def _found(self) -> Any:
        try:
            return json.loads((self.path / "about.json").read_bytes())
        except (OSError, ValueError):
            return None


def replace(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, whole."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
