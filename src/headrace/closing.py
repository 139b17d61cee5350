"""Closing: what is closed at the end of a with statement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class Closing(ABC):
    """A with statement gives the object itself, and closes it however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
