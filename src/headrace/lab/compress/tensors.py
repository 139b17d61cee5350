"""The compressed model's tensors by canonical name, read from finished layers when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.lab.compress.quantized import QuantizedLinear
from headrace.lab.compress.work import Work
from headrace.model.checkpoint import Checkpoint, Dense, as_float32
from headrace.model.quant_tensor import QuantTensor


class CompressedTensors(Mapping[str, QuantizedLinear | Dense]):
    """In the network's order; holds the tensors of one layer at a time.

    What the recipe left alone comes from the source: dense tensors in their own type, quantised ones as
    float32.
    """

    def __init__(self, checkpoint: Checkpoint, work: Work) -> None:
        self._checkpoint = checkpoint
        self._work = work
        self._held: tuple[int, Mapping[str, QuantizedLinear | Dense]] = (-1, {})
        self._names = sorted(checkpoint.names(), key=self._place)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> QuantizedLinear | Dense:
        place = self._place(name)
        if 0 <= place < self._work.finished():
            if self._held[0] != place:
                self._held = (place, self._work.layer(place)[0])
            if name in self._held[1]:
                return self._held[1][name]
        tensor = self._checkpoint.tensor(name)
        return as_float32(tensor) if isinstance(tensor, QuantTensor) else tensor

    def _place(self, name: str) -> int:
        """Which of the finished layers has it: -1, the layers, and behind them the head."""
        if name.startswith("layers."):
            return int(name.split(".", 2)[1])
        return -1 if name.startswith("embed") else len(self._checkpoint.architecture.layers)
