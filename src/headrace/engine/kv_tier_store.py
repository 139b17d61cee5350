"""Where the second tier keeps its bytes, and who moves them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Parts = dict[int, NDArray[np.uint8]]
"""A block's bytes in each KV group that has it, ``[block_bytes]``."""

Job = Callable[[], None]


class TierBlock:
    """One block of content in the second tier.

    Keys are those of the prefix cache; ``root`` is the root key of the block's salt.
    """

    __slots__ = ("checksums", "groups", "key", "parent", "parts", "pins", "root", "slot", "tokens")

    def __init__(
        self, key: bytes, parent: bytes, root: bytes, tokens: bytes, groups: frozenset[int], slot: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.root = root
        self.tokens = tokens
        self.groups = groups
        self.slot = slot
        self.checksums: dict[int, int] = {}  # by group; the store's
        self.pins = 0  # reads and writes under way: until they have ended its slot stays its own
        self.parts: Parts | None = None  # until they are written


class TierStore(Protocol):
    """``num_slots`` places for a block each. Calls may take as long as a disk takes; one at a time."""

    num_slots: int
    slot_bytes: int
    is_kept: bool  # what is in it outlives the process

    def blocks(self) -> list[TierBlock]:
        """What is in it at the start, oldest first."""
        ...

    def write(self, block: TierBlock, parts: Parts) -> None:
        """Fill the block's slot. Raises OSError, and then the slot holds nothing."""
        ...

    def read(self, block: TierBlock, groups: frozenset[int]) -> Parts | None:
        """What was written, of some of its groups; None if it is damaged. Raises OSError."""
        ...

    def close(self) -> None:
        """No call follows. Closing twice is fine."""
        ...


class MemoryStore:
    """Host memory, which the system commits as it is touched: a tier behind a device's memory."""

    is_kept = False

    def __init__(self, num_slots: int, block_bytes: tuple[int, ...]) -> None:
        self.num_slots = num_slots
        self.slot_bytes = sum(block_bytes)
        self._groups = [np.empty((num_slots, size), np.uint8) for size in block_bytes]

    def blocks(self) -> list[TierBlock]:
        """See :class:`TierStore`."""
        return []

    def write(self, block: TierBlock, parts: Parts) -> None:
        """See :class:`TierStore`."""
        for group, part in parts.items():
            self._groups[group][block.slot] = part

    def read(self, block: TierBlock, groups: frozenset[int]) -> Parts | None:
        """See :class:`TierStore`."""
        return {group: self._groups[group][block.slot].copy() for group in groups}

    def close(self) -> None:
        """See :class:`TierStore`."""
        self._groups = []


class Worker(Protocol):
    """Who calls the store."""

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Do ``job`` some time, in order; all that is urgent goes before all that is not."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until a job has ended since the last call, or so long."""
        ...

    def close(self) -> None:
        """Do what was submitted; nothing is submitted any more."""
        ...


class Inline:
    """Does every job at once: for a store that nobody has to wait for."""

    def submit(self, job: Job, *, urgent: bool) -> None:
        """See :class:`Worker`."""
        job()

    def wait(self, timeout_s: float) -> None:
        """See :class:`Worker`: there is nothing to wait for."""

    def close(self) -> None:
        """See :class:`Worker`."""


class Background:
    """A thread of its own: no step waits for a disk."""

    def __init__(self) -> None:
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._wake = threading.Condition()
        self._ended = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="headrace-kv-tier", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, urgent: bool) -> None:
        """See :class:`Worker`."""
        with self._wake:
            (self._urgent if urgent else self._others).append(job)
            self._wake.notify()

    def wait(self, timeout_s: float) -> None:
        """See :class:`Worker`."""
        self._ended.wait(timeout_s)
        self._ended.clear()

    def close(self) -> None:
        """See :class:`Worker`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._urgent or self._others or self._is_closing):
                    self._wake.wait()
                if not (self._urgent or self._others):
                    return
                job = (self._urgent or self._others).popleft()
            job()
            self._ended.set()
